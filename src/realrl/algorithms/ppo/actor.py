"""Method of the `actor.train` call."""

import torch
from torch import Tensor

from realrl.algorithms.base import PlainTrain
from realrl.algorithms.method import Metrics, ModelOutput, Sum
from realrl.algorithms.packed import Responses
from realrl.algorithms.policy.losses import compute_policy_loss
from realrl.algorithms.policy.metrics import UpdateMetrics
from realrl.algorithms.policy.normalization import global_moments, whiten
from realrl.algorithms.ppo.config import PPOConfig
from realrl.algorithms.ppo.experience import (
    Experience,
    ExperienceMaker,
    add_to_batch,
    find_actions,
    scored,
)
from realrl.data.batch import Batch, Ragged


class ActorTrain(PlainTrain):
    """Clipped policy gradient over action tokens; every one of a mini-batch weighs the same."""

    entropy: bool = True

    def __init__(self, config: PPOConfig, *, restricted: bool = False, skips: bool = False) -> None:
        """`restricted` and `skips` as of `ExperienceMaker`."""
        self._config, self._skips = config, skips
        self.epochs = config.epochs
        self.experience_maker = ExperienceMaker(config, restricted=restricted, skips=skips)
        self._update_metrics = UpdateMetrics()
        self._stopped = False

    def prepare(self, batch: Batch, dp_sum: Sum) -> tuple[Batch, Metrics]:
        """Add `advantages`, like `sequences`, 0 on prompts; normalised over all ranks if so configured."""
        self._update_metrics.begin_step()
        self._stopped = False
        experience = self.experience_maker.make_experience(batch, dp_sum)
        moments = global_moments(experience.advantages, dp_sum)
        advantages = experience.advantages
        if self._config.advantage_norm:
            advantages = whiten(advantages, moments)
        metrics = _summarize_experience(batch, experience, self._config, skips=self._skips)
        number = experience.kl.new_tensor
        metrics.mean("advantage_mean", number(moments.mean), 1.0)
        metrics.mean("advantage_std", number(moments.std), 1.0)
        if "ref_logprobs" in batch.fields:
            metrics.mean("kl_coef", number(experience.kl_coef), 1.0)
        return add_to_batch(batch, experience, advantages=advantages), metrics

    def sequences(self, batch: Batch) -> Ragged:
        """Select prompt and response."""
        return batch["sequences"]

    def weight(self, batch: Batch) -> int:
        """Count the action tokens."""
        return find_actions(batch).total

    def loss(self, batch: Batch, output: ModelOutput) -> tuple[Tensor, Metrics]:
        """Compute the policy loss summed over action tokens."""
        assert output.logprobs is not None and output.entropy is not None
        actions = find_actions(batch)
        at = actions.index
        new, old = output.logprobs[at].float(), batch["logprobs"].values[at]
        result = compute_policy_loss(
            log_ratio=new - old,
            advantages=batch["advantages"].values[at],
            clip_low=self._config.clip,
            clip_high=self._config.clip,
        )
        metrics = self._update_metrics.compute(
            result, logprobs=new, old_logprobs=old, entropy=output.entropy[at]
        )
        return result.loss.sum(), metrics

    def stop(self, metrics: dict[str, float]) -> bool:
        """Stop where the mean probability ratio of the mini-batch is too far off.

        A ratio that is not finite is left to the optimizer, which skips its step and counts it.
        """
        self._update_metrics.note_update()
        limit = self._config.early_stop_ratio
        self._stopped = limit is not None and metrics["importance_ratio"] > limit
        return self._stopped

    def finish(self) -> Metrics:
        """Report `early_stopped`: 1 if the rest of the step was dropped, else 0."""
        metrics = Metrics()
        metrics.mean("early_stopped", torch.tensor(float(self._stopped)), 1.0)
        return metrics


def _summarize_experience(batch: Batch, experience: Experience, config: PPOConfig, *, skips: bool) -> Metrics:
    """Compute means over sequences; `score` over those whose score is trained on."""
    metrics, count = Metrics(), len(batch)
    kept = experience.kept
    trained_on = scored(batch["finished"].values, config) & kept
    metrics.mean("score", batch["score"].values[trained_on].sum(), trained_on.sum())
    metrics.mean("reward", experience.rewards.double()[kept].sum(), kept.sum())
    if "ref_logprobs" in batch.fields:
        metrics.mean("kl", experience.kl.sum(), count)
    if skips:
        metrics.mean("skipped", (~kept).double().sum(), count)
    answers = Responses.of(batch["sequences"], batch["prompt_length"])
    metrics.mean("response_tokens", answers.counts.sum(), count)
    metrics.mean("finished", batch["finished"].values.double().sum(), count)
    return metrics
