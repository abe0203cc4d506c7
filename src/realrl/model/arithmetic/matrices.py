"""Multiplication by the matrices of a shard, in whatever way suits a pass."""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from realrl.model.arithmetic.grouped import Groups

Multiply = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Function that multiplies: (x [N, K], weight [M, K], bias [M] or None) -> x @ weight.T + bias [N, M]."""


class Matrices(Protocol):
    """Matrices of a shard, as a pass multiplies by them."""

    @property
    def multiply(self) -> Multiply:
        """Function that computes x @ weight.T + bias."""

    def multiply_groups(self, x: Tensor, stack: Tensor, groups: Groups, *, of_tokens: bool = False) -> Tensor:
        """Multiply each row by the matrix of its group; see `grouped_linear`."""
