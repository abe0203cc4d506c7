"""Calls of autograd functions that, without gradients, spare the bookkeeping of autograd."""

from typing import Any

import torch
from torch.autograd import Function


class _Forgetful:
    """Context of a forward pass that no backward pass follows."""

    def save_for_backward(self, *_: Any) -> None:
        """Save nothing."""

    def mark_dirty(self, *_: Any) -> None:
        """Note nothing."""


def apply_function(function: type[Function], *arguments: Any) -> Any:
    """Apply an autograd function; where gradients are disabled, its forward pass alone.

    Of a decode step of few rows, autograd's bookkeeping would be a tenth.
    """
    if torch.is_grad_enabled():
        return function.apply(*arguments)
    return function.forward(_Forgetful(), *arguments)
