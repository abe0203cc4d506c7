"""Arithmetic of the transformer, with gradients that save memory traffic."""

import platform
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from realrl.model.forward_only import apply_function


def _made_by_intel() -> bool:
    """Check whether the processor is one of Intel's, for which MKL is tuned; False where nothing tells."""
    cpuinfo = Path("/proc/cpuinfo")
    return "GenuineIntel" in (cpuinfo.read_text() if cpuinfo.exists() else platform.processor())


ONEDNN = (
    torch.backends.mkldnn.is_available()
    and platform.machine() in ("x86_64", "AMD64")
    and not _made_by_intel()
)
"""Whether float32 products on a CPU go to oneDNN. Torch would give them to MKL, which takes more than twice as long
on an AMD processor with AVX-512 (bench/matmul.py). On an Intel one it is as fast or faster, and oneDNN compiles and
keeps code for every number of rows, of which generation and packed micro-batches have many."""


def matmul_nt(x: Tensor, weight: Tensor) -> Tensor:
    """Compute x @ weight.T without gradient; "nt" as in BLAS: only the second operand is transposed.

    x: [N, K], weight: [M, K] with any strides -> [N, M]
    """
    if not x.shape[-1]:  # a TP rank without a row of the vocabulary; oneDNN does not support K = 0
        return x.new_zeros(len(x), len(weight))
    if ONEDNN and x.device.type == "cpu" and x.dtype == torch.float32:
        return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return F.linear(x, weight)


def compute_weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """Compute grad.T @ x, the gradient of the weight of `matmul_nt`. grad: [N, M], x: [N, K] -> [M, K]"""
    # The first operand of `matmul_nt` is copied when it is not contiguous, so it should be the narrower one.
    if grad.shape[1] <= x.shape[1]:
        return matmul_nt(grad.T, x.T)
    return matmul_nt(x.T, grad.T).T


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        out = matmul_nt(x, weight)
        return out if bias is None else out.add_(bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        need_x, need_weight, need_bias = ctx.needs_input_grad
        grad_x = matmul_nt(grad, weight.T) if need_x else None
        grad_weight = compute_weight_gradient(grad, x) if need_weight else None
        return grad_x, grad_weight, grad.sum(0, dtype=torch.float32) if need_bias else None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply x @ weight.T and add the bias, if any. x: [N, K], weight: [M, K], bias: [M] -> [N, M]"""
    return apply_function(_Linear, x, weight, bias)


class _RMSNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, scale = ctx.saved_tensors
        grad = grad.float()
        unit = x * scale
        both = grad * unit
        mean = torch.matmul(both, weight.float()).div_(x.shape[-1])
        grad_x = torch.mul(grad, weight).addcmul_(unit, mean.unsqueeze(-1), value=-1).mul_(scale)
        return grad_x.to(x.dtype), both.flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None, None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalize: x / sqrt(mean(x²) + eps) * weight over the last dim (Zhang and Sennrich 2019).

    x: [..., H], weight: [H] -> [..., H]; computed in float32
    """
    # On a CPU torch derives the gradient of its many parts one by one, which takes three times as long and keeps
    # two float32 copies of bfloat16 numbers.
    if x.device.type == "cpu":
        return apply_function(_RMSNorm, x, weight, eps)
    return F.rms_norm(x, weight.shape, weight, eps)


class _SwiGLU(Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, -1)
        out = torch.empty_like(gate_up)
        grad_gate, grad_up = out.chunk(2, -1)
        torch.mul(grad, F.silu(gate), out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=grad_gate)
        return out


def swiglu(gate_up: Tensor) -> Tensor:
    """Compute silu(gate) * up (Shazeer 2020). gate_up: [N, 2 I], gate first -> [N, I]"""
    return apply_function(_SwiGLU, gate_up)
