"""Autograd functions without a backward pass, and activation checkpointing: recomputation in the backward pass."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


class _Forgetful:
    """Context of a forward pass that no backward pass follows."""

    def save_for_backward(self, *_: Any) -> None:
        """Save nothing."""

    def mark_dirty(self, *_: Any) -> None:
        """Note nothing."""

    def mark_non_differentiable(self, *_: Any) -> None:
        """Note nothing."""


def apply_function(function: type[Function], *arguments: Any) -> Any:
    """Apply an autograd function; where gradients are disabled, its forward pass alone.

    Of a decode step of few rows, autograd's bookkeeping would be a tenth.
    """
    if torch.is_grad_enabled():
        return function.apply(*arguments)
    return function.forward(_Forgetful(), *arguments)


class _Checkpoint(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.run = run
        ctx.save_for_backward(x)
        return run(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        (saved,) = ctx.saved_tensors
        x = saved.detach().requires_grad_(True)
        with torch.enable_grad():
            y = ctx.run(x)
        torch.autograd.backward(y, grad)
        return x.grad, None


def checkpoint_activations(run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Compute run(x), keeping only `x` for the backward pass (Chen et al. 2016, arXiv 1604.06174).

    `run` must do the same both times, in particular communicate alike on every rank. Parameters that it uses
    get their gradients then; nothing does unless `x` requires one.
    """
    # torch.utils.checkpoint does this too, for anything: it imports torch's compiler at the first backward
    # pass, and wraps every tensor that an operation saves.
    return _Checkpoint.apply(x, run)
