"""Training of a policy on its own samples: clipped loss, log-probabilities of actor and reference, train method."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from realrl.algorithms.base.method import (
    GenerateMethod,
    Method,
    Metrics,
    ModelOutput,
    PlainInference,
    PlainTrain,
    Sum,
)
from realrl.algorithms.base.rows import Responses
from realrl.algorithms.kl import (
    MAX_LOG_RATIO,
    approximate_kl,
    sequence_kl,
)
from realrl.algorithms.policy import RewardedExperiment
from realrl.algorithms.rewards.reward_methods import make_reward_methods
from realrl.data.batch import Batch, Ragged
from realrl.recipe.algorithm import get_eval_generation


class PolicyLoss(NamedTuple):
    """Loss per token. loss: [A]; ratio: [A] p_new / p_old; clipped: [A] bool, whether clipping took effect."""

    loss: Tensor
    ratio: Tensor
    clipped: Tensor


def compute_policy_loss(
    *,
    log_ratio: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> PolicyLoss:
    """Compute the negated clipped surrogate of PPO (Schulman et al. 2017, equation 7).

    The loss is max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)) with the advantage A and r = exp(log_ratio). DAPO
    uses two different bounds (Yu et al. 2025, equation 8). `dual_clip` limits the loss of a negative advantage to
    -A dual_clip (Ye et al. 2020, equation 5).

    log_ratio: [A] log p_new - log p_old, through which the gradient flows; advantages: [A]
    """
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    followed = ratio if dual_clip is None else ratio.clamp(max=dual_clip)
    plain = -advantages * followed
    bounded = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    clipped = (bounded > plain) | ((followed < ratio) & (advantages < 0))
    return PolicyLoss(torch.maximum(plain, bounded), ratio.detach(), clipped.detach())


@dataclass(frozen=True)
class Moments:
    """Count, mean and variance (mean squared distance from the mean) of the finite numbers on all ranks."""

    count: float
    mean: float
    variance: float

    @property
    def std(self) -> float:
        return float(self.variance**0.5)


def global_moments(values: Tensor, dp_sum: Sum) -> Moments:
    """Compute moments over all ranks. values: [A] on this rank. All moments are 0 if no value is finite.

    Ignoring values that are not finite confines a broken sequence to its own mini-batch.
    """
    # In float32 the result would depend on the order of ranks in the sum.
    x = values.detach().double()
    x = x[x.isfinite()]
    count, total = dp_sum(torch.stack([x.new_tensor(x.numel()), x.sum()])).tolist()
    n = max(count, 1.0)
    mean = total / n
    # Two passes, because mean square minus squared mean is mostly rounding error for numbers far from 0.
    squares = dp_sum((x - mean).square().sum()[None]).item()
    return Moments(count, mean, squares / n)


def whiten(values: Tensor, moments: Moments) -> Tensor:
    """Shift and scale values to mean 0 and deviation 1. values: [A]"""
    return (values - moments.mean) / (moments.std + 1e-8)


class OnSequences:
    """Base of methods that run a model on prompts with answers."""

    def sequences(self, batch: Batch) -> Ragged:
        return batch["sequences"]


class LogprobsInference(OnSequences, PlainInference):
    """Log-probabilities of each sequence's tokens, as the output `key`."""

    def __init__(self, key: str) -> None:
        self.key = key

    def outputs(self, batch: Batch, output: ModelOutput) -> dict[str, Ragged]:
        assert output.logprobs is not None
        return {self.key: Ragged(output.logprobs.float(), output.lengths)}


class RefInference(LogprobsInference):
    """Log-probabilities of each sequence's tokens under the reference, as the output `ref_logprobs`."""

    def __init__(self, *, restricted: bool = False) -> None:
        """`restricted`: whether evaluation excludes tokens, or samples at another temperature than training."""
        super().__init__("ref_logprobs")
        self._restricted = restricted

    def metrics(self, batch: Batch) -> Metrics:
        """Report `kl` in evaluations: the divergence from the reference per answer, averaged over answers.

        In training, this call does not get the inputs for `kl`, and the train call reports it.
        """
        metrics = Metrics()
        if "prompt_length" in batch.fields and "logprobs" in batch.fields:
            answers = Responses.find(batch)
            metrics.mean("kl", sequence_kl(batch, answers, restricted=self._restricted).sum(), len(batch))
        return metrics


class PolicyTrain(OnSequences, PlainTrain):
    """Train method of a policy, which also measures its distance from the sampler's policy."""

    entropy: bool = True
    _updated = False

    def begin_step(self) -> None:
        """Record that the trainer still holds the weights that the sampler used."""
        self._updated = False

    def stop(self, metrics: dict[str, float]) -> bool:
        """Never stop early. Record that the trainer's weights differ from the sampler's after this mini-batch."""
        self._updated = True
        return False

    def weight(self, batch: Batch) -> float:
        """Count the answer tokens that are kept."""
        return Responses.find(batch).total

    def sum_clipped_loss(
        self, batch: Batch, output: ModelOutput, at: Tensor, clip: float
    ) -> tuple[Tensor, Metrics]:
        """Sum the clipped surrogate over the answer tokens `at` [A]. The old policy is the sampler's."""
        assert output.logprobs is not None and output.entropy is not None
        new, old = output.logprobs[at].float(), batch["logprobs"].values[at]
        advantages = batch["advantages"].values[at]
        result = compute_policy_loss(
            log_ratio=new - old, advantages=advantages, clip_low=clip, clip_high=clip
        )
        metrics = self.measure_update(result, logprobs=new, old_logprobs=old, entropy=output.entropy[at])
        return result.loss.sum(), metrics

    def measure_update(
        self, result: PolicyLoss, *, logprobs: Tensor, old_logprobs: Tensor, entropy: Tensor
    ) -> Metrics:
        """Compute metrics as means over answer tokens, and `sampler_trainer_mismatch`.

        logprobs, old_logprobs, entropy: [A]
        """
        metrics, count = Metrics(), len(logprobs)
        kl = approximate_kl(logprobs=logprobs.detach(), old_logprobs=old_logprobs)
        metrics.mean("policy_loss_per_token", result.loss.sum(), count)
        metrics.mean("importance_ratio", result.ratio.double().sum(), count)
        metrics.mean("clip_fraction", result.clipped.double().sum(), count)
        metrics.mean("approx_kl", kl.double().sum(), count)
        metrics.mean("entropy", entropy.double().sum(), count)
        self.add_mismatch(metrics, logprobs=logprobs, old_logprobs=old_logprobs)
        return metrics

    def add_mismatch(self, metrics: Metrics, *, logprobs: Tensor, old_logprobs: Tensor) -> None:
        """Before the first update of a step, add the largest difference between trainer and sampler.

        The trainer then still holds the sampler's weights, so any difference is numerical.

        logprobs, old_logprobs: [A]
        """
        if not self._updated:
            change = (logprobs.detach() - old_logprobs).abs()
            metrics.max("sampler_trainer_mismatch", change.max() if len(change) else change.new_zeros(()))


def make_sampling_methods(
    experiment: RewardedExperiment, *, finished_only: bool = False
) -> dict[str, Method]:
    """Make the methods that sample, score and compare with the reference. `finished_only`: see `ScoreOptions`."""
    generation, evaluated = experiment.generation, get_eval_generation(experiment)
    return {
        "actor.generate": GenerateMethod(generation, evaluated),
        "ref.inference": RefInference(restricted=evaluated.skews(generation.temperature)),
        **make_reward_methods(experiment.reward, finished_only=finished_only),
    }
