"""Norms, activations and rotary embeddings on a GPU: one kernel forward and one backward each."""

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function

from realrl.model.gpu.library import register_kernel

_NORM_TILE = 4096
"""Elements of a norm's tile. A tile holds several rows if rows are short, as for norms of heads."""
_NORM_PROGRAMS = 256
"""Number of Triton programs in a norm's backward pass. Each program sums the weight's gradient over its rows. There
are about two programs for each multiprocessor of the largest GPUs. The number is fixed, so that sums are the same
on every GPU."""


@triton.jit
def _norm_kernel(
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
        # Round to the stored type, because the backward pass reads the stored value.
        values = values.to(total.dtype.element_ty)
        tl.store(total + place, values, inside)
    wide = values.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide, 1) / width + eps)
    tl.store(inverse_rms + row, inverse, row < rows)
    factor = tl.load(weight + column, column < width, other=0.0).to(tl.float32)
    tl.store(out + place, (wide * inverse[:, None] * factor[None, :]).to(out.dtype.element_ty), inside)


@triton.jit
def _norm_gradient_kernel(
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


def _size_tile(width: int) -> dict[str, int]:
    """Choose the tile from the width alone, so that the order of a row's sums does not depend on the number of
    rows."""
    columns = triton.next_power_of_2(width)
    return {"ROWS": max(1, _NORM_TILE // columns), "COLUMNS": columns}


def _count_warps(tile: dict[str, int]) -> int:
    return min(16, max(4, tile["ROWS"] * tile["COLUMNS"] // 512))


def _find_rows(x: Tensor) -> tuple[int, int, int, int, int]:
    """Find the numbers of rows, of inner rows per outer row, and of columns, and the strides of outer and inner
    rows. x: [N, C] or [N, heads, C]"""
    assert x.stride(-1) == 1, "a row is contiguous"
    inner = x.shape[1] if x.dim() == 3 else 1
    return x.numel() // x.shape[-1], inner, x.shape[-1], x.stride(0), x.stride(1) if x.dim() == 3 else 0


@register_kernel(
    "rms_norm(Tensor x, Tensor? delta, Tensor weight, float eps, Tensor(a!)? total, Tensor(b!) out, "
    "Tensor(c!) inverse_rms)"
)
def _rms_norm(
    x: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    eps: float,
    total: Tensor | None,
    out: Tensor,
    inverse_rms: Tensor,
) -> None:
    rows, *address = _find_rows(x)
    tile = _size_tile(x.shape[-1])
    grid = (triton.cdiv(rows, tile["ROWS"]),)
    _norm_kernel[grid](
        x, x if delta is None else delta, weight, out if total is None else total, out, inverse_rms,
        rows, *address, eps, ADD=delta is not None, num_warps=_count_warps(tile), **tile,
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
    rows, *address = _find_rows(x)
    tile = _size_tile(x.shape[-1])
    _norm_gradient_kernel[(len(grad_weights),)](
        grad, grad if grad_total is None else grad_total, x, weight, inverse_rms, grad_x, grad_weights,
        rows, *address, ADD=grad_total is not None, num_warps=_count_warps(tile), **tile,
    )  # fmt: skip


def _differentiate_norm(ctx: Any, grad: Tensor, grad_total: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute the gradients of the norm's input and of its weight (float32)."""
    x, weight, inverse_rms = ctx.saved_tensors
    programs = min(_NORM_PROGRAMS, max(1, inverse_rms.numel()))
    grad_weights = weight.new_empty(programs, len(weight), dtype=torch.float32)
    grad_x = x.new_empty(x.shape)
    grad_total = None if grad_total is None else grad_total.contiguous()
    _rms_norm_backward(grad.contiguous(), grad_total, x, weight, inverse_rms, grad_x, grad_weights)
    return grad_x, grad_weights.sum(0)


class RMSNorm(Function):
    """RMS norm: x / sqrt(mean(x²) + eps) * weight over the last dim.

    x: [N, H] or [N, heads, D], with contiguous rows.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = x.new_empty(x.shape)
        inverse_rms = x.new_empty(x.shape[:-1], dtype=torch.float32)
        _rms_norm(x, None, weight, eps, None, out, inverse_rms)
        ctx.save_for_backward(x, weight, inverse_rms)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        return *_differentiate_norm(ctx, grad, None), None


class AddRMSNorm(Function):
    """The sum of x and delta, and its RMS norm. x, delta: [N, H] -> two of [N, H]"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = torch.empty_like(x)
        out = torch.empty_like(x)
        inverse_rms = x.new_empty(len(x), dtype=torch.float32)
        _rms_norm(x, delta, weight, eps, total, out, inverse_rms)
        ctx.save_for_backward(total, weight, inverse_rms)
        return total, out

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        grad_x, grad_weight = _differentiate_norm(ctx, grad, grad_total)
        return grad_x, grad_x, grad_weight, None


class Activate(Function):
    """Activation (silu, gelu or gelu_tanh) of all columns. If gated, it is the activation of the first half of the
    columns, times the second half.

    It is computed by torch's operations. Only the input is saved for the backward pass. x: [N, I], or [N, 2 I] if
    gated -> [N, I]
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, activation: str, gated: bool) -> Tensor:
        ctx.save_for_backward(x)
        ctx.activation, ctx.gated = activation, gated
        if not gated:
            return _compute_activation(x, activation)
        gate, up = x.chunk(2, 1)
        return _compute_activation(gate, activation).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        if not ctx.gated:
            return _differentiate_activation(grad, x, ctx.activation), None, None
        gate, up = x.chunk(2, 1)
        out = torch.empty_like(x)
        grad_gate, grad_up = out.chunk(2, 1)
        grad_up.copy_(grad * _compute_activation(gate, ctx.activation))
        grad_gate.copy_(_differentiate_activation(grad * up, gate, ctx.activation))
        return out, None, None


def _compute_activation(x: Tensor, activation: str) -> Tensor:
    if activation == "silu":
        return F.silu(x)
    return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


def _differentiate_activation(grad: Tensor, x: Tensor, activation: str) -> Tensor:
    if activation == "silu":
        return torch.ops.aten.silu_backward(grad, x)
    return torch.ops.aten.gelu_backward(grad, x, approximate="tanh" if activation == "gelu_tanh" else "none")


_BLOCK = 1024


@triton.jit
def _swiglu_kernel(gate_up, out, width, slope, limit, offset, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_up + row * 2 * width + column, inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + column, inside, other=0.0).to(tl.float32)
    # Comparisons with NaN are false, so NaN stays NaN.
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(tl.abs(up) > limit, tl.where(up > 0, limit, -limit), up)
    value = gate * tl.sigmoid(slope * gate) * (up + offset)
    tl.store(out + row * width + column, value.to(out.dtype.element_ty), inside)


@triton.jit
def _swiglu_gradient_kernel(grad, gate_up, grad_gate_up, width, slope, limit, offset, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    upstream = tl.load(grad + row * width + column, inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_up + row * 2 * width + column, inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + column, inside, other=0.0).to(tl.float32)
    above, outside = gate > limit, tl.abs(up) > limit
    gate = tl.where(above, limit, gate)
    up = tl.where(outside, tl.where(up > 0, limit, -limit), up)
    sigmoid = tl.sigmoid(slope * gate)
    silu = gate * sigmoid
    grad_gate = tl.where(above, 0.0, upstream * (up + offset) * (sigmoid + slope * silu * (1 - sigmoid)))
    grad_up = tl.where(outside, 0.0, upstream * silu)
    kind = grad_gate_up.dtype.element_ty
    tl.store(grad_gate_up + row * 2 * width + column, grad_gate.to(kind), inside)
    tl.store(grad_gate_up + row * 2 * width + width + column, grad_up.to(kind), inside)


def _grid(rows: int, width: int) -> tuple[int, int]:
    return rows, triton.cdiv(width, _BLOCK)


@register_kernel("swiglu(Tensor gate_up, float slope, float limit, float offset, Tensor(a!) out)")
def _swiglu(gate_up: Tensor, slope: float, limit: float, offset: float, out: Tensor) -> None:
    width = out.shape[1]
    _swiglu_kernel[_grid(*out.shape)](gate_up, out, width, slope, limit, offset, BLOCK=_BLOCK)


@register_kernel(
    "swiglu_backward(Tensor grad, Tensor gate_up, float slope, float limit, float offset, "
    "Tensor(a!) grad_gate_up)"
)
def _swiglu_backward(
    grad: Tensor, gate_up: Tensor, slope: float, limit: float, offset: float, grad_gate_up: Tensor
) -> None:
    width = grad.shape[1]
    _swiglu_gradient_kernel[_grid(*grad.shape)](
        grad, gate_up, grad_gate_up, width, slope, limit, offset, BLOCK=_BLOCK
    )


class SwiGLU(Function):
    """A gated activation (`families.shape.SwiGLU`), computed in float32. gate_up: [N, 2 I] -> [N, I]"""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, numbers: tuple[float, float, float]) -> Tensor:
        gate_up = gate_up.contiguous()
        ctx.save_for_backward(gate_up)
        ctx.numbers = numbers
        out = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
        _swiglu(gate_up, *numbers, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (gate_up,) = ctx.saved_tensors
        out = torch.empty_like(gate_up)
        _swiglu_backward(grad.contiguous(), gate_up, *ctx.numbers, out)
        return out, None


@triton.jit
def _add_biases_kernel(rows, biases, groups, weights, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    bias = tl.load(biases + tl.load(groups + row) * width + column, inside, other=0.0).to(tl.float32)
    place = rows + row * width + column
    total = tl.load(place, inside, other=0.0).to(tl.float32) + bias * tl.load(weights + row)
    tl.store(place, total.to(rows.dtype.element_ty), inside)


@register_kernel("add_biases(Tensor(a!) rows, Tensor biases, Tensor groups, Tensor weights)")
def add_biases(rows: Tensor, biases: Tensor, groups: Tensor, weights: Tensor) -> None:
    """Add to each row the bias of its group, times the row's weight, in place.

    rows: [R, M], biases: [E, M], groups: [R] int64, weights: [R] float32; all are contiguous
    """
    _add_biases_kernel[_grid(*rows.shape)](rows, biases, groups, weights, rows.shape[1], BLOCK=_BLOCK)


_ROTATED = 2048
"""Number of pairs of elements that a Triton program rotates. They belong to several heads of one token."""


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
    """Write all heads to the target, and rotate the first `rotated` heads by `sign` times the angle.

    If source and target are the same tensor, only the rotated heads are written.
    """
    tokens, pairs = cos.shape
    all_heads = source.shape[1] // (2 * pairs)
    heads = rotated if source is target else all_heads
    half = triton.next_power_of_2(pairs)
    at_once = min(triton.next_power_of_2(heads), max(1, _ROTATED // half))
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
        ctx.save_for_backward(cos, sin)
        ctx.heads = heads
        ctx.mark_dirty(qkv)
        _rotate_heads(qkv, cos, sin, heads)
        return qkv

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        grad = grad.contiguous()
        out = torch.empty_like(grad)
        _rotate_heads_backward(grad, cos, sin, ctx.heads, out)
        return out, None, None, None
