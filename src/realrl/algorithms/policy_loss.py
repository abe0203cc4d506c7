"""What algorithms share that train a policy on its own samples: losses, divergences, moments, methods."""

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
from realrl.algorithms.policy import KLConfig, KLEstimator, RewardedExperiment
from realrl.algorithms.rewards.methods import make_reward_methods
from realrl.data.batch import Batch, Ragged
from realrl.recipe.algorithm import get_eval_generation

# exp() of this is finite in float32; an infinite ratio would turn the zero gradient of its clipped branch into NaN.
# No ratio that training should follow comes near e^20.
MAX_LOG_RATIO = 20.0


def approximate_kl(*, logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """Estimate KL(old || new) from tokens that old drew (Schulman 2020, "Approximating KL divergence", k3).

    r - 1 - log r >= 0 with r = p_new / p_old.

    logprobs, old_logprobs: [A]; result: [A]
    """
    log_ratio = (logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return log_ratio.expm1() - log_ratio


def estimate_kl(estimator: KLEstimator, *, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Estimate KL(actor || reference) from tokens that the actor drew (Schulman 2020).

    With x = log p_actor - log p_ref, k1 is x, k2 is x^2 / 2, and k3 is exp(-x) - 1 + x.

    logprobs, ref_logprobs: [A]; result: [A]
    """
    if estimator == "k3":
        return approximate_kl(logprobs=ref_logprobs, old_logprobs=logprobs)
    log_ratio = logprobs - ref_logprobs
    return log_ratio if estimator == "k1" else 0.5 * log_ratio.square()


def token_kl(log_ratio: Tensor, *, restricted: bool) -> Tensor:
    """Estimate the KL divergence of the actor from the reference at each token that the actor drew.

    log_ratio: [A] log p_actor - log p_ref over the whole vocabulary; result: [A]

    For unrestricted samples this is log_ratio itself, whose mean is the divergence (Schulman 2020, k1). If sampling
    excludes tokens (`restricted`), that mean can be negative. The mean of r - 1 - log r with r = p_ref / p_actor
    (k3) then is the generalised divergence, sum of p log(p / q) - p + q over the tokens that can be drawn, divided
    by the actor's total probability of these tokens. It is never negative, and 0 only if actor and reference agree
    on all of these tokens.
    """
    if not restricted:
        return log_ratio
    return approximate_kl(logprobs=-log_ratio, old_logprobs=torch.zeros_like(log_ratio))


def sequence_kl(batch: Batch, answers: Responses, *, restricted: bool) -> Tensor:
    """Sum `token_kl` over each answer. [N] float64"""
    log_ratio = (batch["logprobs"].values - batch["ref_logprobs"].values)[answers.index]
    return answers.row_sums(token_kl(log_ratio, restricted=restricted))


# Ziegler et al. 2019, section 2.2, clip the relative error, so that one odd batch cannot move the coefficient far.
MAX_RELATIVE_ERROR = 0.2


class KLController:
    """Coefficient of the KL penalty: fixed, or steered so that the KL per sequence approaches a target."""

    def __init__(self, config: KLConfig) -> None:
        self._config = config
        self.coef: float = config.coef

    def update(self, *, kl: float, sequences: int) -> None:
        """Update an adaptive coefficient: coef *= 1 + clip(kl / target - 1, -0.2, 0.2) * sequences / horizon.

        kl: mean over the step's sequences, in nats; sequences: those with a finite KL, over all ranks. 0 sequences
        change nothing.
        """
        if self._config.adaptive and sequences:
            error = kl / self._config.target - 1
            error = min(max(error, -MAX_RELATIVE_ERROR), MAX_RELATIVE_ERROR)
            self.coef *= 1 + error * sequences / self._config.horizon

    def state_dict(self) -> dict[str, float]:
        return {"kl_coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore an adaptive coefficient. A fixed coefficient comes from the recipe."""
        if self._config.adaptive:
            self.coef = state["kl_coef"]


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

    max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)) with r = exp(log_ratio). DAPO uses two different bounds (Yu
    et al. 2025, equation 8). `dual_clip` limits the loss of a negative advantage to -A dual_clip (Ye et al. 2020,
    equation 5).

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
    # Two passes: for numbers far from 0, mean square minus squared mean is nothing but rounding errors.
    squares = dp_sum((x - mean).square().sum()[None]).item()
    return Moments(count, mean, squares / n)


def whiten(values: Tensor, moments: Moments) -> Tensor:
    """Shift and scale values to mean 0 and deviation 1. values: [A]"""
    return (values - moments.mean) / (moments.std + 1e-8)


class OnSequences:
    """Method that runs the model on prompts with answers."""

    def sequences(self, batch: Batch) -> Ragged:
        return batch["sequences"]


class LogprobsInference(OnSequences, PlainInference):
    """Log-probabilities of each sequence, as the output `key`."""

    def __init__(self, key: str) -> None:
        self.key = key

    def outputs(self, batch: Batch, output: ModelOutput) -> dict[str, Ragged]:
        assert output.logprobs is not None
        return {self.key: Ragged(output.logprobs.float(), output.lengths)}


class RefInference(LogprobsInference):
    """Log-probabilities of each sequence under the reference, `ref_logprobs`."""

    def __init__(self, *, restricted: bool = False) -> None:
        """`restricted`: whether evaluation excludes tokens, or samples at another temperature than training."""
        super().__init__("ref_logprobs")
        self._restricted = restricted

    def metrics(self, batch: Batch) -> Metrics:
        """Report `kl` in evaluations: divergence from the reference, summed over an answer, mean over answers.

        In training this call lacks the inputs, and the train call reports the metric.
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
        """Note that the trainer holds the sampler's weights."""
        self._updated = False

    def stop(self, metrics: dict[str, float]) -> bool:
        """Never stop early. The update of the first mini-batch follows."""
        self._updated = True
        return False

    def weight(self, batch: Batch) -> float:
        """Number of answer tokens that are kept."""
        return Responses.find(batch).total

    def sum_clipped_loss(
        self, batch: Batch, output: ModelOutput, at: Tensor, clip: float
    ) -> tuple[Tensor, Metrics]:
        """Sum the clipped surrogate over the answer tokens `at` [A]. The sampler's policy is the old one."""
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
        """Compute means over answer tokens, and `sampler_trainer_mismatch`. logprobs, old_logprobs, entropy: [A]"""
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
        """Add the largest change of a log-probability before the first update. logprobs, old_logprobs: [A]

        Until then the trainer holds the sampler's weights, so any difference is numerical.
        """
        if not self._updated:
            change = (logprobs.detach() - old_logprobs).abs()
            metrics.max("sampler_trainer_mismatch", change.max() if len(change) else change.new_zeros(()))


def make_sampling_methods(
    experiment: RewardedExperiment, *, finished_only: bool = False
) -> dict[str, Method]:
    """Make the methods that sample, score and compare with the reference; `finished_only` as in `ScoreOptions`."""
    generation, evaluated = experiment.generation, get_eval_generation(experiment)
    return {
        "actor.generate": GenerateMethod(generation, evaluated),
        "ref.inference": RefInference(restricted=evaluated.skews(generation.temperature)),
        **make_reward_methods(experiment.reward, finished_only=finished_only),
    }
