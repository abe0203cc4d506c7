"""Rotary position embeddings: frequencies, cosines and sines, and their application."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from realrl.families.registry import find_layer_options
from realrl.families.shape import ModelShape, RopeScaling
from realrl.model.arithmetic.autograd import apply_function
from realrl.model.cpu import elementwise as cpu
from realrl.model.gpu.path import load_kernels, on_gpu


@dataclass(frozen=True, eq=False)
class Rotation:
    """Rotation of query and key heads by their positions."""

    frequencies: Tensor
    """Rotation of each pair of dims, in radians per position; 0 for pairs that are not rotated. [head_dim / 2]
    float32"""
    factors: Tensor | None
    """Factor that multiplies the cosine and the sine of each pair; None if all factors are 1. [head_dim / 2]
    float32"""

    def tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Compute cosines and sines of the angles, times the factors. [T] -> two of [T, head_dim / 2] float32"""
        angles = positions.unsqueeze(-1).float() * self.frequencies
        cos, sin = angles.cos(), angles.sin()
        return (cos, sin) if self.factors is None else (cos.mul_(self.factors), sin.mul_(self.factors))

    def to(self, device: torch.device) -> "Rotation":
        return Rotation(
            self.frequencies.to(device), None if self.factors is None else self.factors.to(device)
        )


def make_rotation(shape: ModelShape, layer: int) -> Rotation | None:
    """Make the rotation of a layer, on the CPU; None if it leaves heads unchanged.

    Attention kernels scale scores by 1 / sqrt(head_dim). If the family scales them differently, queries and keys
    are each multiplied by the square root of the ratio.
    """
    options = find_layer_options(shape)
    half = shape.head_dim // 2
    frequencies, factors = torch.zeros(half), torch.ones(half)
    if not options.learned_positions and layer not in shape.unrotated_layers:
        rotated = (shape.rotary_dim or shape.head_dim) // 2
        if layer in shape.windowed_layers and shape.windowed_rope_theta is not None:
            found, factor = _compute_frequencies(2 * rotated, shape.windowed_rope_theta, None)
        else:
            found, factor = _compute_frequencies(2 * rotated, shape.rope_theta, shape.rope_scaling)
        frequencies[:rotated] = found
        factors[:rotated] = factor
    if options.attention_scale is not None:
        factors *= math.sqrt(options.attention_scale * math.sqrt(shape.head_dim))
    plain = bool((factors == 1).all())
    if plain and not frequencies.any():
        return None
    return Rotation(frequencies, None if plain else factors)


def _compute_frequencies(dims: int, theta: float, scaling: RopeScaling | None) -> tuple[Tensor, float]:
    """Compute the radians per position of each pair of dims, and the factor that multiplies cosines and sines. ->
    [dims / 2], factor

    Plain frequencies are theta^(-2i / D) (Su et al. 2021, section 3.2.2).
    """
    exponents = torch.arange(0, dims, 2, dtype=torch.float32) / dims
    plain = 1.0 / theta**exponents
    if scaling is None or scaling.kind == "dynamic":
        return plain, 1.0
    if scaling.kind == "linear":
        return plain / scaling.factor, 1.0
    original = scaling.original_max_position_embeddings
    assert original is not None, "RopeScaling has checked it"
    if scaling.kind == "llama3":
        return _scale_as_llama3(plain, scaling, original), 1.0
    if scaling.kind == "yarn":
        return _scale_by_yarn(plain, theta, scaling, original), _find_yarn_factor(scaling)
    divisors = scaling.long_factor if scaling.long else scaling.short_factor
    assert divisors is not None, "RopeScaling has checked it"
    factor = scaling.attention_factor
    if factor is None:  # arXiv 2402.13753, as in Phi-3's own code
        factor = math.sqrt(1 + math.log(max(1.0, scaling.factor)) / math.log(original))
    return 1.0 / (torch.tensor(divisors) * theta**exponents), factor


def _scale_as_llama3(plain: Tensor, scaling: RopeScaling, original: int) -> Tensor:
    """Divide frequencies with long wavelengths, keep frequencies with short wavelengths, and blend in between."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    assert low is not None and high is not None, "RopeScaling has checked it"
    rotations = original * plain / (2 * math.pi)
    # Llama 4 has equal bounds, so there is nothing to blend.
    blend = ((rotations - low) / (high - low)).clamp(0, 1) if low < high else (rotations > low).float()
    return blend * plain + (1 - blend) * plain / scaling.factor


def _scale_by_yarn(plain: Tensor, theta: float, scaling: RopeScaling, original: int) -> Tensor:
    """Divide frequencies that make few rotations within the original length, keep those that make many, and blend
    linearly in between (arXiv 2309.00071, 3.2)."""
    dims = 2 * len(plain)

    def find_dim(rotations: float) -> float:
        return dims * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = find_dim(scaling.beta_fast), find_dim(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    # Very short original lengths give low > high. The quotient is then negative, as in transformers.
    ramp = ((torch.arange(len(plain)) - low) / (high - low or 0.001)).clamp(0, 1)
    return plain * (1 - ramp) + plain / scaling.factor * ramp


def _find_yarn_factor(scaling: RopeScaling) -> float:
    """Find the factor that multiplies cosines and sines: the given factor, or 0.1 ln(factor) + 1 (arXiv 2309.00071,
    section 3.4)."""
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.factor <= 1:
        return 1.0
    growth = 0.1 * math.log(scaling.factor)
    if scaling.mscale and scaling.mscale_all_dim:
        return (growth * scaling.mscale + 1) / (growth * scaling.mscale_all_dim + 1)
    return growth + 1


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
    """Apply rotary embeddings to the first heads, in place (Su et al. 2021). Dim i forms a pair with dim i + D / 2,
    as in Llama.

    qkv: [T, all heads * D]; cos, sin: [T, D / 2] of a `Rotation`; computed in float32.
    """
    function = load_kernels().elementwise.RotateHeads if on_gpu(qkv) else _ApplyRotaryEmb
    return apply_function(function, qkv, cos, sin, heads)
