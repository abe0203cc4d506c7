"""Rotary position embeddings on a GPU: packed queries, keys and values are rotated in place by one kernel."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function

from realrl.model.gpu.library import register_kernel

_TILE = 2048
"""Pairs of numbers that a program rotates, of several heads of one token."""


@triton.jit
def _rotate_kernel(
    source, cos, sin, target, all_heads, heads, rotated, half, sign,
    HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    pair = tl.arange(0, HALF)
    inside = (head[:, None] < heads) & (pair[None, :] < half)
    low = (token * all_heads + head[:, None]) * 2 * half + pair[None, :]
    table = token * half + pair
    cosine = tl.load(cos + table, pair < half, other=0.0)[None, :]
    sine = tl.load(sin + table, pair < half, other=0.0)[None, :] * sign
    turns = (head < rotated)[:, None]
    cosine = tl.where(turns, cosine, 1.0)
    sine = tl.where(turns, sine, 0.0)
    x = tl.load(source + low, inside, other=0.0).to(tl.float32)
    y = tl.load(source + low + half, inside, other=0.0).to(tl.float32)
    kind = target.dtype.element_ty
    tl.store(target + low, (x * cosine - y * sine).to(kind), inside)
    tl.store(target + low + half, (y * cosine + x * sine).to(kind), inside)


def _launch(source: Tensor, cos: Tensor, sin: Tensor, target: Tensor, rotated: int, sign: float) -> None:
    """Write all heads to the target, the first ones rotated, or by -1 rotated back; in place only those."""
    tokens, pairs = cos.shape
    all_heads = source.shape[1] // (2 * pairs)
    heads = rotated if source is target else all_heads
    half = triton.next_power_of_2(pairs)
    at_once = min(triton.next_power_of_2(heads), max(1, _TILE // half))
    _rotate_kernel[(tokens, triton.cdiv(heads, at_once))](
        source, cos, sin, target, all_heads, heads, rotated, pairs, sign, HEADS=at_once, HALF=half
    )


@register_kernel("rotate_heads(Tensor(a!) qkv, Tensor cos, Tensor sin, int heads)")
def _rotate_heads(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int) -> None:
    _launch(qkv, cos, sin, qkv, heads, 1.0)


@register_kernel("rotate_heads_backward(Tensor grad, Tensor cos, Tensor sin, int heads, Tensor(a!) grad_qkv)")
def _rotate_heads_backward(grad: Tensor, cos: Tensor, sin: Tensor, heads: int, grad_qkv: Tensor) -> None:
    _launch(grad, cos, sin, grad_qkv, heads, -1.0)


class RotateHeads(Function):
    """Rotation of the first heads, in place. qkv: [T, all heads * D], contiguous; cos, sin: [T, D / 2] float32"""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
        """Rotate by the angles."""
        ctx.save_for_backward(cos, sin)
        ctx.heads = heads
        ctx.mark_dirty(qkv)
        _rotate_heads(qkv, cos, sin, heads)
        return qkv

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        """Rotate back."""
        cos, sin = ctx.saved_tensors
        grad = grad.contiguous()
        out = torch.empty_like(grad)
        _rotate_heads_backward(grad, cos, sin, ctx.heads, out)
        return out, None, None, None
