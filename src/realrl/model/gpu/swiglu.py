"""SwiGLU on a GPU: one kernel forward and one backward."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function

from realrl.model.gpu.library import register_kernel

_BLOCK = 1024


@triton.jit
def _forward_kernel(gate_up, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_up + row * 2 * width + column, inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + column, inside, other=0.0).to(tl.float32)
    value = gate * tl.sigmoid(gate) * up
    tl.store(out + row * width + column, value.to(out.dtype.element_ty), inside)


@triton.jit
def _backward_kernel(grad, gate_up, grad_gate_up, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    upstream = tl.load(grad + row * width + column, inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_up + row * 2 * width + column, inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + column, inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    grad_gate = upstream * up * (sigmoid + silu * (1 - sigmoid))
    grad_up = upstream * silu
    kind = grad_gate_up.dtype.element_ty
    tl.store(grad_gate_up + row * 2 * width + column, grad_gate.to(kind), inside)
    tl.store(grad_gate_up + row * 2 * width + width + column, grad_up.to(kind), inside)


def _grid(rows: int, width: int) -> tuple[int, int]:
    return rows, triton.cdiv(width, _BLOCK)


@register_kernel("swiglu(Tensor gate_up, Tensor(a!) out)")
def _swiglu(gate_up: Tensor, out: Tensor) -> None:
    _forward_kernel[_grid(*out.shape)](gate_up, out, out.shape[1], BLOCK=_BLOCK)


@register_kernel("swiglu_backward(Tensor grad, Tensor gate_up, Tensor(a!) grad_gate_up)")
def _swiglu_backward(grad: Tensor, gate_up: Tensor, grad_gate_up: Tensor) -> None:
    _backward_kernel[_grid(*grad.shape)](grad, gate_up, grad_gate_up, grad.shape[1], BLOCK=_BLOCK)


class SwiGLU(Function):
    """Activation silu(gate) * up. gate_up: [N, 2 I] -> [N, I]; computed in float32"""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        """Compute the product."""
        gate_up = gate_up.contiguous()
        ctx.save_for_backward(gate_up)
        out = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
        _swiglu(gate_up, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Compute the gradient of gate and up."""
        (gate_up,) = ctx.saved_tensors
        out = torch.empty_like(gate_up)
        _swiglu_backward(grad.contiguous(), gate_up, out)
        return out
