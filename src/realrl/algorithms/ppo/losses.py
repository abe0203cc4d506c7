"""Losses of PPO, per token."""

from typing import NamedTuple

import torch
from torch import Tensor

# exp() stays finite in float32 up to 88; an infinite ratio would turn the gradient of its own clipped branch,
# which is 0, into NaN. No ratio that training should follow comes near e^20.
MAX_LOG_RATIO = 20.0


class PolicyLoss(NamedTuple):
    """Policy loss per token. loss: [A]; ratio: [A] p_new / p_old; clipped: [A] bool, whether clipping decided."""

    loss: Tensor
    ratio: Tensor
    clipped: Tensor


class ValueLoss(NamedTuple):
    """Value loss per token. loss: [A]; clipped: [A] bool, whether clipping decided the loss."""

    loss: Tensor
    clipped: Tensor


def policy_loss(*, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip: float) -> PolicyLoss:
    """Compute the negated clipped surrogate of PPO (Schulman et al. 2017, equation 7).

    max(-A r, -A clip(r, 1 - clip, 1 + clip)) with r = exp(logprobs - old_logprobs).

    logprobs, old_logprobs, advantages: [A]; the gradient flows through `logprobs` only.
    """
    ratio = (logprobs - old_logprobs.detach()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - clip, 1 + clip)
    return PolicyLoss(torch.maximum(plain, bounded), ratio.detach(), (bounded > plain).detach())


def value_loss(*, values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None) -> ValueLoss:
    """Compute the clipped squared error of values (as in OpenAI baselines' ppo2).

    0.5 max((v - R)^2, (clip(v, old - clip, old + clip) - R)^2), or 0.5 (v - R)^2 where `clip` is None.

    values, old_values, returns: [A]; the gradient flows through `values` only.
    """
    plain = (values - returns).square()
    if clip is None:
        return ValueLoss(0.5 * plain, torch.zeros_like(plain, dtype=torch.bool))
    bounded = (torch.clamp(values, old_values - clip, old_values + clip) - returns).square()
    return ValueLoss(0.5 * torch.maximum(plain, bounded), (bounded > plain).detach())


def approximate_kl(*, logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """Estimate KL(old || new) from tokens sampled from old (Schulman 2020, "Approximating KL divergence", k3).

    r - 1 - log r >= 0 with r = p_new / p_old.

    logprobs, old_logprobs: [A]; result: [A]
    """
    log_ratio = (logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return log_ratio.expm1() - log_ratio
