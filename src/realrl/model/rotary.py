"""Rotary position embeddings: frequencies, cosines and sines, and their application."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from realrl.families.shape import ModelShape
from realrl.model.autograd import apply_function
from realrl.model.cpu import elementwise as cpu
from realrl.model.gpu.path import load_kernels, on_gpu


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


def build_rotary_tables(positions: Tensor, inverse_frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Compute cosines and sines of the angle of each pair of dims. positions: [T] -> [T, D / 2] each, float32"""
    angle = positions.unsqueeze(-1).float() * inverse_frequencies
    return angle.cos(), angle.sin()


class _ApplyRotaryEmb(Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.heads = heads
        ctx.mark_dirty(qkv)
        cpu.rotate(len(qkv), qkv, cos, sin, heads, 1.0, qkv)
        return qkv

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        grad = grad.contiguous()
        grad_qkv = torch.empty_like(grad)
        cpu.rotate(len(grad), grad, cos, sin, ctx.heads, -1.0, grad_qkv)
        return grad_qkv, None, None, None


def apply_rotary_emb(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
    """Apply rotary embeddings to the first heads, in place (Su et al. 2021; halves paired as in Llama).

    qkv: [T, all heads * D]; cos, sin: [T, D / 2] from `build_rotary_tables`; computed in float32.
    """
    function = load_kernels().RotateHeads if on_gpu(qkv) else _ApplyRotaryEmb
    return apply_function(function, qkv, cos, sin, heads)
