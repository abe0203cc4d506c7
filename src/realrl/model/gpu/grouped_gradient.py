"""Gradients of stacked matrices, one per group of rows; the product adds to float32 gradients directly."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from realrl.model.gpu.library import register_kernel
from realrl.model.gpu.paged_attention import product_type

_SIDE, _ROWS = 128, 64
"""Side of a gradient's tile, and rows that are multiplied at a time."""
_UNALIGNED_SIDE = 64
"""Side of a tile if a gradient's sizes are not multiples of 16: a larger tile would not fit into registers."""


@triton.jit
def _gradient_kernel(
    grad, x, ends, into, height, width,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, PRODUCT: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(2)
    end = tl.load(ends + group)
    first = tl.load(ends + group - 1, group > 0, other=0)
    if first < end:
        m = tl.program_id(0) * HEIGHT + tl.arange(0, HEIGHT)
        k = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
        has_m, has_k = m < height, k < width
        total = tl.zeros([HEIGHT, WIDTH], tl.float32)
        for start in range(first, end, ROWS):
            row = (start + tl.arange(0, ROWS)).to(tl.int64)
            inside = row < end
            a = tl.load(
                grad + row[:, None] * height + m[None, :], inside[:, None] & has_m[None, :], other=0.0
            )
            b = tl.load(x + row[:, None] * width + k[None, :], inside[:, None] & has_k[None, :], other=0.0)
            total = tl.dot(tl.trans(a.to(PRODUCT)), b.to(PRODUCT), total, input_precision="ieee")
        place = into + (group.to(tl.int64) * height + m[:, None]) * width + k[None, :]
        mask = has_m[:, None] & has_k[None, :]
        tl.store(place, tl.load(place, mask) + total, mask)


@register_kernel("add_grouped_gradient(Tensor grad, Tensor x, Tensor ends, Tensor(a!) into)")
def add_grouped_gradient(grad: Tensor, x: Tensor, ends: Tensor, into: Tensor) -> None:
    """Add grad[rows].T @ x[rows] of each group's rows to its gradient, with float32 sums.

    The host need not know the sizes of groups; the gradient of a group without rows is not touched. grad: [R, M],
    x: [R, K] bfloat16; ends: [E] int32, the end of each group; into: [E, M, K] float32; all are contiguous
    """
    assert all(of.is_contiguous() for of in (grad, x, ends, into)), "one number after the other"
    assert grad.dtype == x.dtype == torch.bfloat16 and into.dtype == torch.float32
    groups, height, width = into.shape
    if len(x) and into.numel():
        side = _UNALIGNED_SIDE if height % 16 or width % 16 else _SIDE
        grid = (triton.cdiv(height, side), triton.cdiv(width, side), groups)
        _gradient_kernel[grid](
            grad, x, ends, into, height, width,
            HEIGHT=side, WIDTH=side, ROWS=_ROWS, PRODUCT=product_type(x.dtype), num_warps=8,
        )  # fmt: skip
