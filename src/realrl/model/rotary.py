"""Rotary position embeddings: frequencies, cosines and sines, and their application."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from realrl.families.shape import ModelShape
from realrl.model.forward_only import apply_function


def compute_inverse_frequencies(shape: ModelShape) -> Tensor:
    """Compute the radians per position of each pair of dims, on the CPU. [head_dim / 2], float32

    Plain frequencies are theta^(-2i / D) (Su et al. 2021, section 3.2.2). Llama 3's scaling divides those of
    long wavelengths by `factor`, leaves short ones alone and blends in between.
    """
    exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    plain = 1.0 / shape.rope_theta**exponents
    scaling = shape.rope_scaling
    if scaling is None:
        return plain
    wavelengths = 2 * math.pi / plain
    low = scaling.low_freq_factor
    high = scaling.high_freq_factor
    rotations = scaling.original_max_position_embeddings / wavelengths
    blend = ((rotations - low) / (high - low)).clamp(0, 1)
    return blend * plain + (1 - blend) * plain / scaling.factor


def build_rotary_tables(
    positions: Tensor, inverse_frequencies: Tensor, heads: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Compute cosines and signed sines, laid out for `apply_rotary_emb`. positions: [T] -> [T, heads, D] each

    The sines of the first half are negative: a head is rotated as x * cos + swap_halves(x) * sin.
    """
    angle = positions.unsqueeze(-1).float() * inverse_frequencies
    cos = angle.cos()
    sin = angle.sin()
    cos = torch.cat((cos, cos), -1).unsqueeze(1).to(dtype).expand(-1, heads, -1)
    sin = torch.cat((-sin, sin), -1).unsqueeze(1).to(dtype).expand(-1, heads, -1)
    if positions.device.type == "cpu":
        # Repeated in memory, a row of heads is one long loop instead of many short ones: twice as fast.
        return cos.contiguous(), sin.contiguous()
    return cos, sin


class _ApplyRotaryEmb(Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.mark_dirty(qkv)
        rotated = qkv.view(len(qkv), -1, cos.shape[-1])[:, : cos.shape[1]]
        swapped_halves = rotated.roll(cos.shape[-1] // 2, -1)
        rotated.mul_(cos).addcmul_(swapped_halves, sin)
        return qkv

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        heads = cos.shape[1]
        grad_heads = grad.reshape(len(grad), -1, cos.shape[-1])
        grad_qkv = torch.empty_like(grad_heads)
        grad_qkv[:, heads:] = grad_heads[:, heads:]
        # The inverse rotation, by the negative angle.
        grad_rotated = grad_heads[:, :heads]
        swapped_halves = grad_rotated.roll(cos.shape[-1] // 2, -1)
        torch.mul(grad_rotated, cos, out=grad_qkv[:, :heads]).addcmul_(swapped_halves, sin, value=-1)
        return grad_qkv.view_as(grad), None, None


def apply_rotary_emb(qkv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary embeddings to the first heads, in place (Su et al. 2021; halves paired as in Llama).

    qkv: [T, all heads * D]; cos, sin: [T, heads, D] from `build_rotary_tables`.
    """
    return apply_function(_ApplyRotaryEmb, qkv, cos, sin)
