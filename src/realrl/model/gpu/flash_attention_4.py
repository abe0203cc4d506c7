"""FlashAttention 4 by the names that torch's adapter for it looks for (`torch.nn.attention._fa4`)."""

from typing import Any

from flash_attn.cute import interface
from torch import Tensor

_flash_attn_bwd = interface._flash_attn_bwd


def _flash_attn_fwd(*arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """Return the output and its log-sum-exps, which torch unpacks, without the further results of the package."""
    output, sums, *_ = interface._flash_attn_fwd(*arguments, **options)
    return output, sums
