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
from realrl.algorithms.base.rows import AGES, Responses
from realrl.algorithms.kl import (
    MAX_LOG_RATIO,
    approximate_kl,
    sequence_kl,
)
from realrl.algorithms.policy import ClippedPolicyConfig, RewardedExperiment, SamplerCorrection
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


class SamplerWeights(NamedTuple):
    """Weight per token. weights: [A] float64; beyond: [A] bool, whether the ratio is outside the limits."""

    weights: Tensor
    beyond: Tensor


def compute_sampler_weights(
    *, log_ratio: Tensor, answers: Responses, mode: SamplerCorrection, cap: float
) -> SamplerWeights:
    """Compute bounded importance weights.

    A weight is r = exp(log_ratio) or, in the modes `sequence_...`, the product of r over the tokens of its answer.
    Truncation replaces r by min(r, cap) (Ionides 2008, "Truncated importance sampling"). Masking replaces r by 0
    outside [1 / cap, cap] (IcePop). TRL calls the modes token_truncate, token_mask, sequence_truncate and
    sequence_mask.

    log_ratio: [A] log p_old - log p_sampler, without gradient. mode: any but `none`.
    """
    log_ratio = log_ratio.double()
    if mode in ("sequence_truncate", "sequence_mask"):
        log_ratio = answers.row_sums(log_ratio)[answers.row]
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    if mode in ("truncate", "sequence_truncate"):
        return SamplerWeights(ratio.clamp(max=cap), ratio > cap)
    beyond = (ratio > cap) | (ratio < 1 / cap)
    return SamplerWeights(torch.where(beyond, 0.0, ratio), beyond)


def find_old_logprobs(batch: Batch, at: Tensor) -> Tensor:
    """Find the log-probabilities of the tokens `at` under the old policy, see `ClippedPolicyConfig`. [A] -> [A]"""
    return batch["old_logprobs" if "old_logprobs" in batch.fields else "logprobs"].values[at]


WEIGHTS = "sampler_weights"
"""Field with the weight of each token's loss, 0 on prompts."""


def weigh(loss: Tensor, batch: Batch, at: Tensor) -> Tensor:
    """Multiply the losses of the tokens `at` by their weights, if the batch has weights. [A], [A] -> [A]"""
    return loss * batch[WEIGHTS].values[at] if WEIGHTS in batch.fields else loss


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
    stale: bool = False
    """Whether samples may come from weights of earlier steps."""
    _updated = False

    def begin_step(self) -> None:
        """Record that the trainer still holds the weights from the start of the step."""
        self._updated = False

    def stop(self, metrics: dict[str, float]) -> bool:
        """Never stop early. Record that this mini-batch changes the trainer's weights."""
        self._updated = True
        return False

    def weight(self, batch: Batch) -> float:
        """Count the answer tokens that are kept."""
        return Responses.find(batch).total

    def correct_sampler(
        self, config: ClippedPolicyConfig, batch: Batch, answers: Responses, dp_sum: Sum
    ) -> tuple[Batch, Metrics]:
        """Compare the recomputed log-probabilities, if there are any, with the sampler's. `prepare` calls this.

        With `sampler_correction`, add the weights of tokens as a field, and report means over all answer tokens:
        `sampler_weight`, and the share of tokens whose ratio was limited, `sampler_corrections_beyond_cap`. Of N
        weights w, also report the `effective_sample_size` (sum of w)^2 / (N sum of w^2), between 0 and 1 (Kish
        1965). For stale samples, `stale_kl` is the mean divergence of the old policy from the sampler's, in nats
        per token. `staleness` is their mean age in training steps, with or without recomputed log-probabilities.

        answers: the answers in the loss
        """
        metrics = Metrics()
        if AGES in batch.fields:
            metrics.mean("staleness", batch[AGES].values[answers.index].sum(), answers.total)
        if not config.recompute_logprobs:
            return batch, metrics
        old, sampled = (batch[key].values[answers.index].double() for key in ("old_logprobs", "logprobs"))
        if self.stale:
            kl = approximate_kl(logprobs=old, old_logprobs=sampled)
            metrics.mean("stale_kl", kl.sum(), answers.total)
        if config.sampler_correction == "none":
            return batch, metrics
        weights, beyond = compute_sampler_weights(
            log_ratio=old - sampled, answers=answers, mode=config.sampler_correction, cap=config.sampler_cap
        )
        moments = global_moments(weights, dp_sum)
        mean_square = moments.mean**2 + moments.variance
        effective = moments.mean**2 / mean_square if mean_square else 0.0
        metrics.mean("sampler_weight", weights.sum(), answers.total)
        metrics.mean("sampler_corrections_beyond_cap", beyond.double().sum(), answers.total)
        metrics.mean("effective_sample_size", weights.new_tensor(effective), 1.0)
        return batch.with_fields(**{WEIGHTS: answers.spread(weights.float())}), metrics

    def sum_clipped_loss(
        self, batch: Batch, output: ModelOutput, at: Tensor, clip: float
    ) -> tuple[Tensor, Metrics]:
        """Sum the clipped surrogate, times the weights of `correct_sampler`, over the answer tokens `at` [A]."""
        assert output.logprobs is not None and output.entropy is not None
        new = output.logprobs[at].float()
        result = compute_policy_loss(
            log_ratio=new - find_old_logprobs(batch, at),
            advantages=batch["advantages"].values[at],
            clip_low=clip,
            clip_high=clip,
        )
        metrics = self.measure_update(result, batch, at, logprobs=new, entropy=output.entropy[at])
        return weigh(result.loss, batch, at).sum(), metrics

    def measure_update(
        self, result: PolicyLoss, batch: Batch, at: Tensor, *, logprobs: Tensor, entropy: Tensor
    ) -> Metrics:
        """Compute metrics as means over the answer tokens `at` [A], and call `add_mismatch`.

        logprobs, entropy: [A]
        """
        metrics, count = Metrics(), len(logprobs)
        kl = approximate_kl(logprobs=logprobs.detach(), old_logprobs=find_old_logprobs(batch, at))
        metrics.mean("policy_loss_per_token", result.loss.sum(), count)
        metrics.mean("importance_ratio", result.ratio.double().sum(), count)
        metrics.mean("clip_fraction", result.clipped.double().sum(), count)
        metrics.mean("approx_kl", kl.double().sum(), count)
        metrics.mean("entropy", entropy.double().sum(), count)
        if not (self.stale and "old_logprobs" in batch.fields):  # `correct_sampler` has reported `stale_kl`
            self.add_mismatch(metrics, logprobs=logprobs, sampled=batch["logprobs"].values[at])
        return metrics

    def add_mismatch(self, metrics: Metrics, *, logprobs: Tensor, sampled: Tensor) -> None:
        """Before the first update of a step, compare the trainer with the sampler.

        `sampler_trainer_mismatch` is the largest difference. The trainer still holds the sampler's weights, so any
        difference is numerical. If samples are stale, the difference comes from training, and its size is
        `stale_kl`: the mean divergence of the trainer from the sampler, in nats per token.

        logprobs, sampled: [A]
        """
        if self._updated:
            return
        if self.stale:
            kl = approximate_kl(logprobs=logprobs.detach(), old_logprobs=sampled)
            metrics.mean("stale_kl", kl.double().sum(), len(kl))
        else:
            change = (logprobs.detach() - sampled).abs()
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
