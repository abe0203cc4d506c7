"""FlashAttention 4, under the names that torch's adapter imports (`torch.nn.attention._fa4`)."""

from typing import Any

from flash_attn.cute import interface
from torch import Tensor

_flash_attn_bwd = interface._flash_attn_bwd


def _flash_attn_fwd(*arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """Return only the output and its log-sum-exps. The package returns more results than the two that torch
    unpacks."""
    output, sums, *_ = interface._flash_attn_fwd(*arguments, **options)
    return output, sums
