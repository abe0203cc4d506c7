"""Restriction of token probabilities by top-k and top-p, without sorting the vocabulary."""

import torch
from torch import Tensor

from realrl.model.gpu.library import register_default
from realrl.model.gpu.path import load_kernels, on_gpu

_BISECTIONS = 30
"""Halvings that leave one of the float32 numbers from 0 to 1, whose bits are at most 0x3F800000."""


def keep_top_k(probabilities: Tensor, count: int) -> Tensor:
    """Zero all but the `count` largest probabilities of each row, and those that equal the last of them. [B, V]"""
    if not 0 < count < probabilities.shape[-1]:
        return probabilities
    kept: Tensor = _restrict_to_top_k(probabilities, count)
    return kept


@register_default("restrict_to_top_k(Tensor probabilities, int count) -> Tensor")
def _restrict_to_top_k(probabilities: Tensor, count: int) -> Tensor:
    lowest = probabilities.topk(count, dim=-1).values[:, -1:]
    return probabilities.masked_fill(probabilities < lowest, 0.0)


def keep_top_p(probabilities: Tensor, share: float) -> Tensor:
    """Zero all but the largest probabilities of each row that together have `share` of its sum, at least. [B, V]

    Those before a token in descending order must have less than the share; of equal ones the first come first.
    """
    if share >= 1:
        return probabilities
    kept: Tensor = _restrict_to_top_p(probabilities, share)
    return kept


@register_default("restrict_to_top_p(Tensor probabilities, float share) -> Tensor")
def _restrict_to_top_p(probabilities: Tensor, share: float) -> Tensor:
    if on_gpu(probabilities):
        kept: Tensor = load_kernels().keep_top_p_on_gpu(probabilities.contiguous(), share)
        return kept
    # Floats that are not negative are ordered as their bits are.
    bits = probabilities.view(torch.int32)
    target = share * probabilities.sum(-1, keepdim=True, dtype=torch.float64)
    lowest = torch.zeros_like(bits[:, :1])
    highest = bits.amax(-1, keepdim=True)
    # The largest number that with all larger ones has the share.
    for _ in range(_BISECTIONS):
        middle = highest - (highest - lowest) // 2
        enough = _sum_where(bits >= middle, probabilities) >= target
        lowest = torch.where(enough, middle, lowest)
        highest = torch.where(enough, highest, middle - 1)
    larger = bits > lowest
    equal = bits == lowest
    before = (equal.cumsum(-1, dtype=torch.int32) - 1).double() * lowest.view(torch.float32)
    kept = larger | (equal & (before + _sum_where(larger, probabilities) < target))
    return probabilities.masked_fill(~kept, 0.0)


def _sum_where(chosen: Tensor, values: Tensor) -> Tensor:
    return values.masked_fill(~chosen, 0.0).sum(-1, keepdim=True, dtype=torch.float64)
