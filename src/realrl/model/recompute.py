"""Activation checkpointing: keep the input of a computation and recompute it in the backward pass."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


class _Recomputed(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.run = run
        ctx.save_for_backward(x)
        return run(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        (kept,) = ctx.saved_tensors
        x = kept.detach().requires_grad_(True)
        with torch.enable_grad():
            y = ctx.run(x)
        torch.autograd.backward(y, grad)
        return x.grad, None


def recomputed(run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Compute run(x), keeping only `x` for the backward pass (Chen et al. 2016, arXiv 1604.06174).

    `run` must do the same both times, in particular communicate alike on every rank. Parameters that it uses
    get their gradients then; nothing does unless `x` requires one.
    """
    # torch.utils.checkpoint does this too, for anything: it imports torch's compiler at the first backward
    # pass, and wraps every tensor that an operation saves.
    return _Recomputed.apply(x, run)
