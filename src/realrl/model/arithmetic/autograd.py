"""Autograd functions without a backward pass, and activation checkpointing."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


class _Forgetful:
    """Stand-in for autograd's `ctx` if no backward pass follows. It saves nothing."""

    def _ignore(self, *_: Any) -> None:
        pass

    save_for_backward = mark_dirty = mark_non_differentiable = _ignore


def apply_function(function: type[Function], *arguments: Any) -> Any:
    """Apply an autograd function, or only its forward pass if gradients are disabled.

    Autograd's bookkeeping would cost about 10 % of a small decode step.
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

    `run` must do the same both times; in particular, every rank must communicate in the same order. The backward
    pass computes the gradients of the parameters that `run` uses, but only if `x` requires a gradient.
    """
    # torch.utils.checkpoint is more general, but it imports torch's compiler at the first backward pass and
    # wraps every tensor that an operation saves.
    return _Checkpoint.apply(x, run)
