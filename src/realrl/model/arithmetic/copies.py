"""Copies of rows, with a gradient that sums over the copies of a row in a fixed order."""

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.autograd import Function

from realrl.data.batch import copy_to_device
from realrl.model.arithmetic.autograd import apply_function


@dataclass(frozen=True, eq=False)
class Copies:
    """R rows to copy from N. Some of the N rows may have no copy, and some have several.

    torch's own backward pass adds copies one by one in the type of the gradient, on a GPU in any order.
    """

    count: int
    """N."""
    sources: Tensor
    """The row to copy, for each copy. [R]"""
    single: Tensor
    """Copies of rows that have one copy. [S]"""
    several: Tensor
    """Copies of rows that have several, row by row; the last copy is repeated where a row has fewer. [M, most]"""
    counted: Tensor | None
    """Which of `several` are not such repetitions, 1 or 0; None if all are. [M, most, 1]"""

    @classmethod
    def of(cls, sources: Tensor, count: int, device: torch.device | str) -> Self:
        """sources: [R] int64, in host memory"""
        order = sources.argsort(stable=True)
        copies = torch.bincount(sources, minlength=count)
        ends = copies.cumsum(0)
        many = (copies > 1).nonzero().squeeze(-1)
        steps = torch.arange(int(copies[many].max()) if len(many) else 1)
        inside = steps < copies[many, None]
        places = (ends[many] - copies[many])[:, None] + steps
        several = order[torch.minimum(places, ends[many, None] - 1)]
        single = order[(ends - 1)[copies == 1]]
        tensors = [sources, single, several, inside.float()[:, :, None]]
        sources, single, several, counted = copy_to_device(tensors, torch.device(device))
        return cls(count, sources, single, several, None if bool(inside.all()) else counted)

    def copy(self, rows: Tensor) -> Tensor:
        """[N, ...] -> [R, ...]"""
        copied: Tensor = apply_function(_Copy, rows, self)
        return copied


class _Copy(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, copies: Copies) -> Tensor:
        ctx.copies = copies
        return rows.index_select(0, copies.sources)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        copies: Copies = ctx.copies
        flat = grad.reshape(len(grad), -1)
        out = flat.new_zeros(copies.count, flat.shape[1])
        out.index_copy_(0, copies.sources.index_select(0, copies.single), flat.index_select(0, copies.single))
        if len(copies.several):
            found = flat.index_select(0, copies.several.flatten()).view(*copies.several.shape, -1)
            if copies.counted is not None:
                found = found * copies.counted.to(found.dtype)
            out.index_copy_(0, copies.sources.index_select(0, copies.several[:, 0]), found.sum(1))
        return out.view(copies.count, *grad.shape[1:]), None
