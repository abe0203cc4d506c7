"""Methods of inference calls that compute log-probabilities of sampled answers."""

from realrl.algorithms.method import Metrics, ModelOutput
from realrl.algorithms.packed import Responses
from realrl.algorithms.policy.kl import token_kl
from realrl.data.batch import Batch, Ragged


class LogprobsInference:
    """Log-probabilities of each sequence."""

    def __init__(self, key: str) -> None:
        """`key`: name of the output."""
        self.key = key

    def sequences(self, batch: Batch) -> Ragged:
        """Select prompt and response."""
        return batch["sequences"]

    def outputs(self, batch: Batch, output: ModelOutput) -> dict[str, Ragged]:
        """Compute the output: one number per token."""
        assert output.logprobs is not None
        return {self.key: Ragged(output.logprobs.float(), output.lengths)}

    def metrics(self, batch: Batch) -> Metrics:
        """Report nothing."""
        return Metrics()


class RefInference(LogprobsInference):
    """Log-probabilities of each sequence under the reference, `ref_logprobs`."""

    def __init__(self, *, restricted: bool = False) -> None:
        """`restricted`: whether evaluation leaves tokens out, or draws at another temperature."""
        super().__init__("ref_logprobs")
        self._restricted = restricted

    def metrics(self, batch: Batch) -> Metrics:
        """Compute `kl`, of evaluation: divergence from the reference summed over the response, mean over sequences.

        In training, where the call's inputs do not suffice, the train call reports it.
        """
        metrics = Metrics()
        if "prompt_length" in batch.fields and "logprobs" in batch.fields:
            responses = Responses.of(batch["sequences"], batch["prompt_length"])
            log_ratio = (batch["logprobs"].values - batch[self.key].values)[responses.index]
            kl = token_kl(log_ratio, restricted=self._restricted)
            metrics.mean("kl", kl.double().sum(), len(batch))
        return metrics
