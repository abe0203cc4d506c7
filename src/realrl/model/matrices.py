"""Matrices of a shard as training, inference and prefill multiply by them."""

from collections.abc import Mapping
from functools import partial

from torch import Tensor

from realrl.model.adapter import Adapter, adapt
from realrl.model.arithmetic.grouped import Groups, grouped_linear
from realrl.model.arithmetic.ops import Products, linear


class OwnMatrices:
    """Parameters of a shard as they are, with their adapters; gradients flow."""

    def __init__(self, products: Products, adapters: Mapping[int, Adapter]) -> None:
        """`adapters`: those of some of the matrices, by their `id`."""
        self.multiply = adapt(partial(linear, products=products), adapters)
        self._products = products

    def multiply_groups(self, x: Tensor, stack: Tensor, groups: Groups, *, of_tokens: bool = False) -> Tensor:
        """See `Matrices`."""
        return grouped_linear(x, stack, groups, self._products, of_tokens=of_tokens)
