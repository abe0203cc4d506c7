"""Policy loss and divergence between policies, per token."""

from typing import NamedTuple

import torch
from torch import Tensor

from realrl.algorithms.policy.config import KLEstimator

# exp() stays finite in float32 up to 88; an infinite ratio would turn the gradient of its own clipped branch,
# which is 0, into NaN. No ratio that training should follow comes near e^20.
MAX_LOG_RATIO = 20.0


class PolicyLoss(NamedTuple):
    """Policy loss per token. loss: [A]; ratio: [A] p_new / p_old; clipped: [A] bool, whether clipping decided."""

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

    max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)) with r = exp(log_ratio). Different bounds are those of DAPO
    (Yu et al. 2025, equation 8). With `dual_clip` the loss of a negative advantage is at most -A dual_clip (Ye et
    al. 2020, equation 5).

    log_ratio: [A] log p_new - log p_old, through which the gradient flows; advantages: [A]
    """
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    followed = ratio if dual_clip is None else ratio.clamp(max=dual_clip)
    plain = -advantages * followed
    bounded = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    clipped = (bounded > plain) | ((followed < ratio) & (advantages < 0))
    return PolicyLoss(torch.maximum(plain, bounded), ratio.detach(), clipped.detach())


def approximate_kl(*, logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """Estimate KL(old || new) from tokens sampled from old (Schulman 2020, "Approximating KL divergence", k3).

    r - 1 - log r >= 0 with r = p_new / p_old.

    logprobs, old_logprobs: [A]; result: [A]
    """
    log_ratio = (logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return log_ratio.expm1() - log_ratio


def estimate_kl(estimator: KLEstimator, *, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Estimate KL(actor || reference) from tokens sampled from the actor (Schulman 2020, as above).

    With x = log p_actor - log p_ref, k1 is x, k2 is x^2 / 2, and k3 is exp(-x) - 1 + x.

    logprobs, ref_logprobs: [A]; result: [A]
    """
    if estimator == "k3":
        return approximate_kl(logprobs=ref_logprobs, old_logprobs=logprobs)
    log_ratio = logprobs - ref_logprobs
    return log_ratio if estimator == "k1" else 0.5 * log_ratio.square()
