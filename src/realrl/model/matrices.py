"""Matrices of a shard as training, inference and prefill multiply by them."""

from collections.abc import Mapping
from functools import partial

from torch import Tensor

from realrl.model.adapter import Adapter, adapt
from realrl.model.arithmetic.grouped import Groups, grouped_linear
from realrl.model.arithmetic.ops import Products, linear
from realrl.model.quantised import QuantisedMatrix, multiply_widened, widen_if_quantised


class OwnMatrices:
    """Parameters of a shard as they are, with their adapters; gradients flow."""

    def __init__(
        self,
        products: Products,
        adapters: Mapping[int, Adapter],
        quantised: Mapping[int, QuantisedMatrix],
    ) -> None:
        """`adapters` and `quantised`: those of some of the matrices, by their `id`."""
        self.multiply = adapt(multiply_widened(partial(linear, products=products), quantised), adapters)
        self._products, self._quantised = products, quantised

    def multiply_groups(self, x: Tensor, stack: Tensor, groups: Groups, *, of_tokens: bool = False) -> Tensor:
        """See `Matrices`."""
        stack = widen_if_quantised(stack, self._quantised, x.dtype)
        return grouped_linear(x, stack, groups, self._products, of_tokens=of_tokens)
