"""Matrices of a shard as decode steps multiply by them."""

from collections.abc import Iterable, Mapping

from torch import Tensor

from realrl.model.adapter import Adapter, adapt
from realrl.model.arithmetic.ops import Products, linear
from realrl.model.gpu.path import on_gpu
from realrl.model.quantised import QuantisedMatrix, multiply_widened


class DecodeWeights:
    """Matrices of a shard while a generate call runs: packed where products of few rows are faster so, or exact.

    They do not follow changes of the parameters. Quantised matrices are widened for each product instead: packed
    ones would take the memory that these save.
    """

    def __init__(
        self,
        weights: Iterable[Tensor],
        head: Tensor | None,
        products: Products,
        adapters: Mapping[int, Adapter] | None = None,
        quantised: Mapping[int, QuantisedMatrix] | None = None,
    ) -> None:
        """`weights`: matrices of layers, as `multiply` gets them; `head`: that of the logits, on the last stage;
        `adapters` and `quantised`: those of some of the matrices, by their `id`."""
        quantised = quantised or {}
        fixed = {number: adapter.fix() for number, adapter in (adapters or {}).items()}
        self.multiply = adapt(multiply_widened(self._multiply, quantised), fixed)
        """Function that computes x @ weight.T + bias."""
        self._products = products
        self._head = head
        self._panels = {
            id(weight): products.pack(weight)
            for weight in weights
            if products.packs and not on_gpu(weight) and id(weight) not in quantised
        }
        packs_head = products.packs and head is not None and not on_gpu(head)
        self._packed_head = products.pack(head) if head is not None and packs_head else None

    def _multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute x @ weight.T + bias. x: [N, K], weight: [M, K], bias: [M] -> [N, M]"""
        panels = self._panels.get(id(weight))
        if panels is None:
            return linear(x, weight, bias, self._products)
        # Rounded before the bias is added, as training does.
        out = self._products.multiply_packed(x, panels).to(x.dtype)
        return out if bias is None else out.add_(bias)

    def multiply_by_head(self, hidden: Tensor) -> Tensor:
        """Compute logits without bias: hidden @ head.T. [N, H] -> [N, rows of the head] float32"""
        assert self._head is not None, "only a language model's last stage has a vocabulary"
        if self._packed_head is None:
            return self._products.matmul_nt_float32(hidden, self._head)
        logits = self._products.multiply_packed(hidden, self._packed_head)
        # Training rounds them on a CPU, but for exact products.
        return logits if self._products.exact else logits.to(hidden.dtype).float()
