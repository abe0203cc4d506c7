"""Activations of feed-forward blocks on a GPU other than SwiGLU, by torch's operations."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function


class Activate(Function):
    """An activation of all columns, or of the first half of them, times the second half.

    Keeps its input alone. x: [N, I], or [N, 2 I] if gated -> [N, I]
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, activation: str, gated: bool) -> Tensor:
        """Compute the activation: silu, gelu or gelu_tanh."""
        ctx.save_for_backward(x)
        ctx.activation, ctx.gated = activation, gated
        if not gated:
            return _activate(x, activation)
        gate, up = x.chunk(2, 1)
        return _activate(gate, activation).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Compute the gradient of x."""
        (x,) = ctx.saved_tensors
        if not ctx.gated:
            return _differentiate(grad, x, ctx.activation), None, None
        gate, up = x.chunk(2, 1)
        out = torch.empty_like(x)
        grad_gate, grad_up = out.chunk(2, 1)
        grad_up.copy_(grad * _activate(gate, ctx.activation))
        grad_gate.copy_(_differentiate(grad * up, gate, ctx.activation))
        return out, None, None


def _activate(x: Tensor, activation: str) -> Tensor:
    if activation == "silu":
        return F.silu(x)
    return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


def _differentiate(grad: Tensor, x: Tensor, activation: str) -> Tensor:
    if activation == "silu":
        return torch.ops.aten.silu_backward(grad, x)
    return torch.ops.aten.gelu_backward(grad, x, approximate="tanh" if activation == "gelu_tanh" else "none")
