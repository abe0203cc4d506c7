"""Methods of the inference calls of PPO: reward, reference, critic."""

from realrl.algorithms.method import Metrics, ModelOutput
from realrl.algorithms.packed import Responses, last_of_rows
from realrl.algorithms.ppo.config import PPOConfig
from realrl.algorithms.ppo.experience import scored, to_reward_scale
from realrl.algorithms.ppo.kl import token_kl
from realrl.data.batch import Batch, Ragged


def score_metrics(batch: Batch, config: PPOConfig) -> Metrics:
    """Figures of evaluation about scored sequences, see `RewardInference.metrics`; none without `finished`."""
    metrics, count = Metrics(), len(batch)
    if "prompt_length" in batch.fields and "finished" in batch.fields:
        responses = Responses.of(batch["sequences"], batch["prompt_length"])
        trained_on = scored(batch["finished"].values, config)
        metrics.mean("score", batch["score"].values.double()[trained_on].sum(), trained_on.sum())
        metrics.mean("response_tokens", responses.counts.sum(), count)
        metrics.mean("finished", batch["finished"].values.double().sum(), count)
    return metrics


class RewardInference:
    """Score of each sequence: the reward model's value at its last token."""

    def __init__(self, config: PPOConfig) -> None:
        self._config = config

    def sequences(self, batch: Batch) -> Ragged:
        """Select prompt and response."""
        return batch["sequences"]

    def outputs(self, batch: Batch, output: ModelOutput) -> dict[str, Ragged]:
        """Compute `score`: one number per sequence."""
        assert output.values is not None
        return {"score": Ragged.scalars(last_of_rows(output.values, output.lengths).float())}

    def metrics(self, batch: Batch) -> Metrics:
        """Figures of evaluation: means of `response_tokens` and `finished` over sequences, and of `score` over
        those whose score would be trained on.

        In training, where the call's inputs do not suffice, `actor.train` reports them.
        """
        return score_metrics(batch, self._config)


class RefInference:
    """Log-probabilities of each sequence under the reference."""

    def __init__(self, *, restricted: bool = False) -> None:
        """`restricted`: whether sampling leaves tokens out."""
        self._restricted = restricted

    def sequences(self, batch: Batch) -> Ragged:
        """Select prompt and response."""
        return batch["sequences"]

    def outputs(self, batch: Batch, output: ModelOutput) -> dict[str, Ragged]:
        """Compute `ref_logprobs`: one number per token."""
        assert output.logprobs is not None
        return {"ref_logprobs": Ragged(output.logprobs.float(), output.lengths)}

    def metrics(self, batch: Batch) -> Metrics:
        """Figure of evaluation, `kl`: divergence from the reference summed over the response, mean over sequences.

        In training, where the call's inputs do not suffice, `actor.train` reports it.
        """
        metrics = Metrics()
        if "prompt_length" in batch.fields and "logprobs" in batch.fields:
            responses = Responses.of(batch["sequences"], batch["prompt_length"])
            log_ratio = (batch["logprobs"].values - batch["ref_logprobs"].values)[responses.index]
            kl = token_kl(log_ratio, restricted=self._restricted)
            metrics.mean("kl", kl.double().sum(), len(batch))
        return metrics


class CriticInference:
    """The critic's value of the state after each token."""

    def __init__(self, config: PPOConfig) -> None:
        self._config = config

    def sequences(self, batch: Batch) -> Ragged:
        """Select prompt and response."""
        return batch["sequences"]

    def outputs(self, batch: Batch, output: ModelOutput) -> dict[str, Ragged]:
        """Compute `values`: one number per token, on the scale of rewards."""
        assert output.values is not None
        values = to_reward_scale(output.values.float(), self._config)
        return {"values": Ragged(values, output.lengths)}

    def metrics(self, batch: Batch) -> Metrics:
        """Report nothing: `critic.train` reports on values."""
        return Metrics()
