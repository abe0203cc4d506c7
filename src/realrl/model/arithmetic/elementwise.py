"""Norms and activations of the transformer, with gradients that read and write memory only once."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from realrl.families.shape import SWIGLU, Activation, SwiGLU
from realrl.model.arithmetic.autograd import apply_function
from realrl.model.cpu import elementwise as cpu
from realrl.model.cpu.rows import count_claims
from realrl.model.gpu.path import load_kernels, on_gpu


def _as_rows(x: Tensor) -> Tensor:
    """View as a matrix over the last dim; copies only if the layout requires it. [..., H] -> [N, H]"""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


class _RMSNorm(Function):
    """RMS norm on a CPU, with one kernel forward and one kernel backward. Autograd would differentiate each of its
    operations separately."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows = _as_rows(x)
        out = torch.empty_like(rows)
        scales = torch.empty(len(rows), 1)
        cpu.rms_norm_forward(len(rows), rows, weight.float(), eps, out, scales)
        ctx.save_for_backward(x, weight, scales)
        return out.view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, scales = ctx.saved_tensors
        grad_x, grad_weight = _differentiate_norm(_as_rows(grad), None, x, weight, scales)
        return grad_x.view(x.shape), grad_weight if ctx.needs_input_grad[1] else None, None


class _AddRMSNorm(Function):
    """Sum of two tensors, and its RMS norm, on a CPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, block: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = torch.empty_like(x)
        out = torch.empty_like(x)
        scales = torch.empty(len(x), 1)
        cpu.add_rms_norm_forward(
            len(x), _as_rows(x), _as_rows(block), weight.float(), eps, total, out, scales
        )
        ctx.save_for_backward(total, weight, scales)
        return total, out

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        total, weight, scales = ctx.saved_tensors
        grad_x, grad_weight = _differentiate_norm(_as_rows(grad), _as_rows(grad_total), total, weight, scales)
        return grad_x, grad_x, grad_weight if ctx.needs_input_grad[2] else None, None


def _differentiate_norm(
    grad: Tensor, grad_total: Tensor | None, x: Tensor, weight: Tensor, scales: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of a norm's input x and of its weight. If `grad_total` is given, it is added to the
    gradient of x.

    -> grad_x [N, H], and the gradient of the weight [H] float32
    """
    rows = _as_rows(x)
    grad_x = torch.empty_like(rows)
    sums = torch.zeros(count_claims(rows), rows.shape[1])
    added = torch.zeros(rows.shape[1]) if grad_total is None else grad_total
    cpu.rms_norm_backward(len(rows), rows, grad, weight.float(), scales, added, grad_x, sums)
    return grad_x, sums.sum(0)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalize: x / sqrt(mean(x²) + eps) * weight over the last dim (Zhang and Sennrich 2019).

    x: [..., H], weight: [H] -> [..., H]; computed in float32
    """
    function = load_kernels().elementwise.RMSNorm if on_gpu(x) else _RMSNorm
    return apply_function(function, x, weight, eps)


def add_rms_norm(x: Tensor, block: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add a block's output to the residual stream, and normalize the sum. x, block: [N, H] -> two of [N, H]"""
    function = load_kernels().elementwise.AddRMSNorm if on_gpu(x) else _AddRMSNorm
    return apply_function(function, x, block, weight, eps)


class _AddOne(Function):
    """1 + weight in float32; its gradient is float32 too, even if the weight is not."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight.float() + 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def add_one(weight: Tensor) -> Tensor:
    """Compute 1 + weight in float32, the factor of some families' norms. [H] -> [H]"""
    return apply_function(_AddOne, weight)


class _SwiGLU(Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, numbers: SwiGLU) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.numbers = numbers
        out = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
        cpu.swiglu_forward(len(gate_up), _as_rows(gate_up), *numbers, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (gate_up,) = ctx.saved_tensors
        out = torch.empty_like(gate_up)
        cpu.swiglu_backward(len(gate_up), _as_rows(gate_up), *ctx.numbers, _as_rows(grad), out)
        return out, None


def swiglu(gate_up: Tensor, numbers: SwiGLU = SWIGLU["silu"]) -> Tensor:
    """Compute a gated activation, by default silu(gate) * up (Shazeer 2020). gate_up: [N, 2 I], gate first -> [N,
    I]"""
    function = load_kernels().elementwise.SwiGLU if on_gpu(gate_up) else _SwiGLU
    return apply_function(function, gate_up, numbers)


_NUMBERS = {"silu": cpu.SILU, "gelu": cpu.GELU, "gelu_tanh": cpu.GELU_TANH}


class _Activation(Function):
    """Activation on a CPU, by our own kernel.

    torch vectorises most of a row and computes the remaining elements one by one. The two methods differ in the
    last bits, so a row's result would depend on its place among other rows.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, activation: Activation, gated: bool) -> Tensor:
        ctx.save_for_backward(x)
        ctx.number = _NUMBERS[activation]
        out = x.new_empty(len(x), x.shape[1] // (1 + gated))
        cpu.activate_forward(len(x), _as_rows(x), ctx.number, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        out = torch.empty_like(x)
        cpu.activate_backward(len(x), _as_rows(x), ctx.number, _as_rows(grad), out)
        return out, None, None


def activate(x: Tensor, activation: Activation, *, gated: bool) -> Tensor:
    """Apply the activation to x [N, I]. If `gated`, x is [N, 2 I], gate before up, and the result is
    activation(gate) * up, or what `SWIGLU` says. -> [N, I]"""
    if gated and activation in SWIGLU:
        return swiglu(x, SWIGLU[activation])
    function = load_kernels().elementwise.Activate if on_gpu(x) else _Activation
    return apply_function(function, x, activation, gated)
