"""Loss of the critic, per token."""

from typing import NamedTuple

import torch
from torch import Tensor


class ValueLoss(NamedTuple):
    """Value loss per token. loss: [A]; clipped: [A] bool, whether clipping decided the loss."""

    loss: Tensor
    clipped: Tensor


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
