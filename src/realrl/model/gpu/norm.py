"""RMSNorm on a GPU, alone and after an addition to the residual stream: one kernel forward and one backward."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function

from realrl.model.gpu.library import register_kernel

_TILE = 4096
"""Elements of a tile: several rows where rows are short, such as those of heads."""
_PROGRAMS = 256
"""Programs of the backward pass, each of which sums the weight's gradient over its rows: about two for each
multiprocessor of the largest GPUs. Fixed, so that sums are the same on every one."""


@triton.jit
def _forward_kernel(
    x, delta, weight, total, out, inverse_rms,
    rows, inner, width, outer_stride, inner_stride, eps,
    ADD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    inside = (row[:, None] < rows) & (column[None, :] < width)
    place = row[:, None] * width + column[None, :]
    start = (row // inner) * outer_stride + (row % inner) * inner_stride
    values = tl.load(x + start[:, None] + column[None, :], inside, other=0.0)
    if ADD:
        values = values.to(tl.float32) + tl.load(delta + place, inside, other=0.0).to(tl.float32)
        # Rounded as it is stored, since the backward pass starts from there.
        values = values.to(total.dtype.element_ty)
        tl.store(total + place, values, inside)
    wide = values.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide, 1) / width + eps)
    tl.store(inverse_rms + row, inverse, row < rows)
    factor = tl.load(weight + column, column < width, other=0.0).to(tl.float32)
    tl.store(out + place, (wide * inverse[:, None] * factor[None, :]).to(out.dtype.element_ty), inside)


@triton.jit
def _backward_kernel(
    grad, grad_total, x, weight, inverse_rms, grad_x, grad_weights,
    rows, inner, width, outer_stride, inner_stride,
    ADD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    column = tl.arange(0, COLUMNS)
    factor = tl.load(weight + column, column < width, other=0.0).to(tl.float32)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(program * ROWS, rows, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS).to(tl.int64)
        inside = (row[:, None] < rows) & (column[None, :] < width)
        place = row[:, None] * width + column[None, :]
        start = (row // inner) * outer_stride + (row % inner) * inner_stride
        inverse = tl.load(inverse_rms + row, row < rows, other=0.0)[:, None]
        unit = tl.load(x + start[:, None] + column[None, :], inside, other=0.0).to(tl.float32) * inverse
        upstream = tl.load(grad + place, inside, other=0.0).to(tl.float32)
        total += upstream * unit
        upstream *= factor[None, :]
        mean = tl.sum(upstream * unit, 1)[:, None] / width
        result = (upstream - unit * mean) * inverse
        if ADD:
            result += tl.load(grad_total + place, inside, other=0.0).to(tl.float32)
        tl.store(grad_x + place, result.to(grad_x.dtype.element_ty), inside)
    tl.store(grad_weights + program * width + column, tl.sum(total, 0), column < width)


def _tile(width: int) -> dict[str, int]:
    """Size the tile, whatever the number of rows: sums of a row have one order."""
    columns = triton.next_power_of_2(width)
    return {"ROWS": max(1, _TILE // columns), "COLUMNS": columns}


def _warps(tile: dict[str, int]) -> int:
    return min(16, max(4, tile["ROWS"] * tile["COLUMNS"] // 512))


def _address(x: Tensor) -> tuple[int, int, int, int, int]:
    """Rows, rows per outer row, columns, and the strides of both kinds of rows. x: [N, C] or [N, heads, C]"""
    assert x.stride(-1) == 1, "a row is contiguous"
    inner = x.shape[1] if x.dim() == 3 else 1
    return x.numel() // x.shape[-1], inner, x.shape[-1], x.stride(0), x.stride(1) if x.dim() == 3 else 0


@register_kernel("rms_norm(Tensor x, Tensor weight, float eps, Tensor(a!) out, Tensor(b!) inverse_rms)")
def _rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor, inverse_rms: Tensor) -> None:
    rows, *address = _address(x)
    tile = _tile(x.shape[-1])
    grid = (triton.cdiv(rows, tile["ROWS"]),)
    _forward_kernel[grid](
        x, x, weight, out, out, inverse_rms, rows, *address, eps, ADD=False, num_warps=_warps(tile), **tile
    )


@register_kernel(
    "add_rms_norm(Tensor x, Tensor delta, Tensor weight, float eps, Tensor(a!) total, Tensor(b!) out, "
    "Tensor(c!) inverse_rms)"
)
def _add_rms_norm(
    x: Tensor, delta: Tensor, weight: Tensor, eps: float, total: Tensor, out: Tensor, inverse_rms: Tensor
) -> None:
    rows, *address = _address(x)
    tile = _tile(x.shape[-1])
    grid = (triton.cdiv(rows, tile["ROWS"]),)
    _forward_kernel[grid](
        x, delta, weight, total, out, inverse_rms, rows, *address, eps,
        ADD=True, num_warps=_warps(tile), **tile,
    )  # fmt: skip


@register_kernel(
    "rms_norm_backward(Tensor grad, Tensor? grad_total, Tensor x, Tensor weight, Tensor inverse_rms, "
    "Tensor(a!) grad_x, Tensor(b!) grad_weights)"
)
def _rms_norm_backward(
    grad: Tensor,
    grad_total: Tensor | None,
    x: Tensor,
    weight: Tensor,
    inverse_rms: Tensor,
    grad_x: Tensor,
    grad_weights: Tensor,
) -> None:
    rows, *address = _address(x)
    tile = _tile(x.shape[-1])
    _backward_kernel[(len(grad_weights),)](
        grad, grad if grad_total is None else grad_total, x, weight, inverse_rms, grad_x, grad_weights,
        rows, *address, ADD=grad_total is not None, num_warps=_warps(tile), **tile,
    )  # fmt: skip


def _compute_gradients(ctx: Any, grad: Tensor, grad_total: Tensor | None) -> tuple[Tensor, Tensor]:
    """Gradients of the normalised values, and of the weight."""
    x, weight, inverse_rms = ctx.saved_tensors
    programs = min(_PROGRAMS, max(1, inverse_rms.numel()))
    grad_weights = weight.new_empty(programs, len(weight), dtype=torch.float32)
    grad_x = x.new_empty(x.shape)
    grad_total = None if grad_total is None else grad_total.contiguous()
    _rms_norm_backward(grad.contiguous(), grad_total, x, weight, inverse_rms, grad_x, grad_weights)
    return grad_x, grad_weights.sum(0)


class RMSNorm(Function):
    """RMS norm: x / sqrt(mean(x²) + eps) * weight over the last dim.

    x: [N, H] or [N, heads, D], rows contiguous.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Compute the normalised values."""
        out = x.new_empty(x.shape)
        inverse_rms = x.new_empty(x.shape[:-1], dtype=torch.float32)
        _rms_norm(x, weight, eps, out, inverse_rms)
        ctx.save_for_backward(x, weight, inverse_rms)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        """Compute the gradients of x and of the weight, the latter in float32."""
        return *_compute_gradients(ctx, grad, None), None


class AddRMSNorm(Function):
    """The sum of x and delta, and its RMSNorm. x, delta: [N, H] -> two of [N, H]"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Compute the sum and its norm."""
        total = torch.empty_like(x)
        out = torch.empty_like(x)
        inverse_rms = x.new_empty(len(x), dtype=torch.float32)
        _add_rms_norm(x, delta, weight, eps, total, out, inverse_rms)
        ctx.save_for_backward(total, weight, inverse_rms)
        return total, out

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        """Compute the gradient of both terms, and that of the weight in float32."""
        grad_x, grad_weight = _compute_gradients(ctx, grad, grad_total)
        return grad_x, grad_x, grad_weight, None
