"""Matrices of a shard, as a pass multiplies by them."""

from collections.abc import Mapping
from functools import partial
from typing import Protocol

from torch import Tensor

from realrl.model.adapter import Adapter, Multiply, adapt
from realrl.model.arithmetic.grouped import Groups, grouped_linear
from realrl.model.arithmetic.ops import Products, linear


class Matrices(Protocol):
    """Multiplication by the matrices of a shard, in the way that suits a pass."""

    @property
    def multiply(self) -> Multiply:
        """Function that computes x @ weight.T + bias."""

    def multiply_groups(self, x: Tensor, stack: Tensor, groups: Groups, *, of_tokens: bool = False) -> Tensor:
        """Multiply each row by the matrix of its group; see `grouped_linear`."""


class OwnMatrices:
    """Parameters of a shard as they are, with their adapters; gradients flow."""

    def __init__(self, products: Products, adapters: Mapping[int, Adapter]) -> None:
        """`adapters`: those of some of the matrices, by their `id`."""
        self.multiply = adapt(partial(linear, products=products), adapters)
        self._products = products

    def multiply_groups(self, x: Tensor, stack: Tensor, groups: Groups, *, of_tokens: bool = False) -> Tensor:
        """See `Matrices`."""
        return grouped_linear(x, stack, groups, self._products, of_tokens=of_tokens)
