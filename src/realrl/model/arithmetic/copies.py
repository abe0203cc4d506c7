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
    several: tuple[Tensor, ...]
    """Copies of rows that have more: their first copies, their second copies, and so on. Rows with the most copies
    come first, so each tensor is as long as the one before, or shorter."""

    @classmethod
    def of(cls, sources: Tensor, count: int, device: torch.device | str) -> Self:
        """sources: [R] int64, in host memory"""
        order = sources.argsort(stable=True)
        copies = torch.bincount(sources, minlength=count)
        firsts = copies.cumsum(0) - copies
        single = order[firsts[copies == 1]]
        many = (copies > 1).nonzero().squeeze(-1)
        many = many[copies[many].argsort(descending=True, stable=True)]
        most = int(copies[many[:1]].sum())
        several = [order[firsts[many[copies[many] > number]] + number] for number in range(most)]
        sources, single, *several = copy_to_device([sources, single, *several], torch.device(device))
        return cls(count, sources, single, tuple(several))

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
        if copies.several:
            # Sums are in float32, because a row may have many copies.
            total = flat.index_select(0, copies.several[0]).float()
            for more in copies.several[1:]:
                total[: len(more)] += flat.index_select(0, more)
            out.index_copy_(0, copies.sources.index_select(0, copies.several[0]), total.to(out.dtype))
        return out.view(copies.count, *grad.shape[1:]), None
