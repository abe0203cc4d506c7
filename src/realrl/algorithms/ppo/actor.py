"""Method of the `actor.train` call."""

import torch
from torch import Tensor

from realrl.algorithms.base import PlainTrain
from realrl.algorithms.method import Metrics, ModelOutput, Sum
from realrl.algorithms.packed import Responses
from realrl.algorithms.ppo.config import PPOConfig
from realrl.algorithms.ppo.experience import Experience, ExperienceMaker, scored
from realrl.algorithms.ppo.losses import approximate_kl, policy_loss
from realrl.algorithms.ppo.normalization import global_moments, whiten
from realrl.data.batch import Batch, Ragged


class ActorTrain(PlainTrain):
    """Clipped policy gradient over action tokens; every one of a mini-batch weighs the same."""

    entropy: bool = True

    def __init__(self, config: PPOConfig, *, restricted: bool = False) -> None:
        """`restricted`: whether sampling leaves tokens out."""
        self._config = config
        self.epochs = config.epochs
        self.experience_maker = ExperienceMaker(config, restricted=restricted)
        self._updated = False
        self._stopped = False

    def prepare(self, batch: Batch, dp_sum: Sum) -> tuple[Batch, Metrics]:
        """Add `advantages`, like `sequences`, 0 on prompts; normalised over all ranks if so configured."""
        self._updated = self._stopped = False
        experience = self.experience_maker.make_experience(batch, dp_sum)
        moments = global_moments(experience.advantages, dp_sum)
        advantages = experience.advantages
        if self._config.advantage_norm:
            advantages = whiten(advantages, moments)
        metrics = _summarize_experience(batch, experience, self._config)
        number = experience.kl.new_tensor
        metrics.mean("advantage_mean", number(moments.mean), 1.0)
        metrics.mean("advantage_std", number(moments.std), 1.0)
        metrics.mean("kl_coef", number(experience.kl_coef), 1.0)
        return batch.with_fields(advantages=experience.actions.spread(advantages)), metrics

    def sequences(self, batch: Batch) -> Ragged:
        """Select prompt and response."""
        return batch["sequences"]

    def weight(self, batch: Batch) -> int:
        """Count the action tokens."""
        return Responses.of(batch["sequences"], batch["prompt_length"]).total

    def loss(self, batch: Batch, output: ModelOutput) -> tuple[Tensor, Metrics]:
        """Compute the policy loss summed over action tokens."""
        assert output.logprobs is not None and output.entropy is not None
        actions = Responses.of(batch["sequences"], batch["prompt_length"])
        at, count = actions.index, actions.total
        new, old = output.logprobs[at].float(), batch["logprobs"].values[at]
        advantages = batch["advantages"].values[at]
        result = policy_loss(logprobs=new, old_logprobs=old, advantages=advantages, clip=self._config.clip)
        loss = result.loss.sum()

        metrics, change = Metrics(), (new - old).detach()
        metrics.mean("policy_loss", loss, count)
        metrics.mean("importance_ratio", result.ratio.double().sum(), count)
        metrics.mean("clip_fraction", result.clipped.double().sum(), count)
        kl = approximate_kl(logprobs=new.detach(), old_logprobs=old)
        metrics.mean("approx_kl", kl.double().sum(), count)
        metrics.mean("entropy", output.entropy[at].double().sum(), count)
        if not self._updated:
            # Before the first update the trainer holds the sampler's weights: any difference is numerical.
            metrics.max("sampler_trainer_mismatch", change.abs().max() if count else change.new_zeros(()))
        return loss, metrics

    def stop(self, metrics: dict[str, float]) -> bool:
        """Stop where the mean probability ratio of the mini-batch is too far off.

        A ratio that is not finite is left to the optimizer, which skips its step and counts it.
        """
        self._updated = True
        limit = self._config.early_stop_ratio
        self._stopped = limit is not None and metrics["importance_ratio"] > limit
        return self._stopped

    def finish(self) -> Metrics:
        """Report `early_stopped`: 1 if the rest of the step was dropped, else 0."""
        metrics = Metrics()
        metrics.mean("early_stopped", torch.tensor(float(self._stopped)), 1.0)
        return metrics


def _summarize_experience(batch: Batch, experience: Experience, config: PPOConfig) -> Metrics:
    """Compute means over sequences; `score` over those whose score is trained on."""
    metrics, count = Metrics(), len(batch)
    trained_on = scored(batch["finished"].values, config)
    metrics.mean("score", batch["score"].values.double()[trained_on].sum(), trained_on.sum())
    metrics.mean("reward", experience.rewards.double().sum(), count)
    metrics.mean("kl", experience.kl.sum(), count)
    metrics.mean("response_tokens", experience.actions.counts.sum(), count)
    metrics.mean("finished", batch["finished"].values.double().sum(), count)
    return metrics
