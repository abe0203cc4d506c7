"""The inference calls of PPO: reward, reference, critic."""

from realrl.algorithms.method import Metrics, ModelOutput
from realrl.algorithms.packed import Responses, last_of_rows
from realrl.data.batch import Batch, Ragged


class RewardInference:
    """Score of each sequence: the reward model's value at its last token."""

    def sequences(self, batch: Batch) -> Ragged:
        """Prompt and response."""
        return batch["sequences"]

    def outputs(self, batch: Batch, output: ModelOutput) -> dict[str, Ragged]:
        """`score`: one number per sequence."""
        assert output.values is not None
        return {"score": Ragged.scalars(last_of_rows(output.values, output.lengths).float())}

    def metrics(self, batch: Batch) -> Metrics:
        """In evaluation `score`, `response_tokens`, `finished`: means over sequences.

        In training, where the call's inputs do not suffice, `actor.train` reports them."""
        metrics, count = Metrics(), len(batch)
        if "prompt_length" in batch.fields and "finished" in batch.fields:
            responses = Responses.of(batch["sequences"], batch["prompt_length"])
            metrics.mean("score", batch["score"].values.double().sum(), count)
            metrics.mean("response_tokens", responses.counts.sum(), count)
            metrics.mean("finished", batch["finished"].values.double().sum(), count)
        return metrics


class RefInference:
    """Log-probabilities of each sequence under the reference."""

    def sequences(self, batch: Batch) -> Ragged:
        """Prompt and response."""
        return batch["sequences"]

    def outputs(self, batch: Batch, output: ModelOutput) -> dict[str, Ragged]:
        """`ref_logprobs`: one number per token."""
        assert output.logprobs is not None
        return {"ref_logprobs": Ragged(output.logprobs.float(), output.lengths)}

    def metrics(self, batch: Batch) -> Metrics:
        """In evaluation `kl`: log p_actor - log p_ref summed over the response, mean over sequences.

        In training, where the call's inputs do not suffice, `actor.train` reports it."""
        metrics = Metrics()
        if "prompt_length" in batch.fields and "logprobs" in batch.fields:
            responses = Responses.of(batch["sequences"], batch["prompt_length"])
            log_ratio = (batch["logprobs"].values - batch["ref_logprobs"].values)[responses.index]
            metrics.mean("kl", log_ratio.double().sum(), len(batch))
        return metrics


class CriticInference:
    """The critic's value of the state after each token."""

    def sequences(self, batch: Batch) -> Ragged:
        """Prompt and response."""
        return batch["sequences"]

    def outputs(self, batch: Batch, output: ModelOutput) -> dict[str, Ragged]:
        """`values`: one number per token, on the critic's own scale."""
        assert output.values is not None
        return {"values": Ragged(output.values.float(), output.lengths)}

    def metrics(self, batch: Batch) -> Metrics:
        """None: `critic.train` reports on values."""
        return Metrics()
