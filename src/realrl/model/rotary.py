"""Rotary position embeddings: frequencies, cosines and sines."""

import math

import torch
from torch import Tensor

from realrl.families.shape import ModelShape


def frequencies(shape: ModelShape) -> Tensor:
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
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    turns = scaling.original_max_position_embeddings / wavelengths
    blend = ((turns - low) / (high - low)).clamp(0, 1)
    return blend * plain + (1 - blend) * plain / scaling.factor


def rotary(positions: Tensor, frequency: Tensor, heads: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Compute cosines and signed sines, laid out for `rotate`. positions: [T] -> [T, heads, D] each

    The sines of the first half are negative: a head turns as x * cos + swap_halves(x) * sin.
    """
    angle = positions.unsqueeze(-1).float() * frequency
    cos, sin = angle.cos(), angle.sin()
    wide = [torch.cat(halves, -1).unsqueeze(1).to(dtype) for halves in ((cos, cos), (-sin, sin))]
    cos, sin = (half.expand(-1, heads, -1) for half in wide)
    if positions.device.type == "cpu":
        # Repeated in memory, a row of heads is one long loop instead of many short ones: twice as fast.
        return cos.contiguous(), sin.contiguous()
    return cos, sin
