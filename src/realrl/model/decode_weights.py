"""Matrices of a shard as decode steps multiply by them."""

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from realrl.families.shape import Mixture
from realrl.model.adapter import Adapter, adapt
from realrl.model.arithmetic.grouped import Groups, grouped_linear, has_grouped_kernel
from realrl.model.arithmetic.matrices import Multiply
from realrl.model.arithmetic.ops import Products, linear
from realrl.model.cpu.products import Panels
from realrl.model.gpu.path import on_gpu
from realrl.model.quantised import QuantisedMatrix, multiply_widened, widen_if_quantised


class DecodeWeights:
    """Matrices of a shard while a generate call runs: packed where products of few rows are faster so, or exact.

    They do not follow changes of the parameters, unless `follow_parameters` says so. Quantised matrices are widened
    for each product instead: packed ones would take the memory that these save.
    """

    def __init__(
        self,
        weights: Iterable[Tensor],
        head: Tensor | None,
        products: Products,
        adapters: Mapping[int, Adapter] | None = None,
        quantised: Mapping[int, QuantisedMatrix] | None = None,
        stacks: Iterable[Tensor] = (),
        mixture: Mixture | None = None,
    ) -> None:
        """`weights`: matrices of layers, as `multiply` gets them; `head`: that of the logits, on the last stage;
        `adapters` and `quantised`: those of some of the matrices, by their `id`; `stacks`: those of a mixture's
        experts."""
        self._quantised = quantised = quantised or {}
        fixed = {number: adapter.fix() for number, adapter in (adapters or {}).items()}
        panels = {
            id(weight): products.pack(weight)
            for weight in weights
            if products.packs and not on_gpu(weight) and id(weight) not in quantised
        }
        self.multiply = adapt(multiply_widened(_multiply_by(panels, products), quantised), fixed)
        """Function that computes x @ weight.T + bias."""
        self._products = products
        self._head = head
        self._stacks: dict[int, Sequence[Panels]] = {}
        self.runs_ahead = True
        """Whether the host may launch decode steps before it knows anything of them, as in a CUDA graph."""
        for stack in stacks:
            assert mixture is not None, "only mixtures have stacks"
            experts = stack.view(mixture.experts, -1, stack.shape[1])
            if on_gpu(stack):
                self.runs_ahead &= has_grouped_kernel(experts, products)
            elif products.packs and id(stack) not in quantised:
                self._stacks[id(stack)] = [products.pack(weight) for weight in experts]
        packs_head = products.packs and head is not None and not on_gpu(head)
        self._packed_head = products.pack(head) if head is not None and packs_head else None
        packed = panels or self._stacks or packs_head
        scaled = any(adapter.magnitude is not None for adapter in (adapters or {}).values())
        self.follow_parameters = not packed and not scaled
        """Whether they are right, too, after parameters have changed at their addresses."""

    def multiply_groups(self, x: Tensor, stack: Tensor, groups: Groups, *, of_tokens: bool = False) -> Tensor:
        """Multiply each row by the matrix of its group; see `grouped_linear`."""
        panels = self._stacks.get(id(stack))
        if panels is None:
            stack = widen_if_quantised(stack, self._quantised, x.dtype)
            return grouped_linear(x, stack, groups, self._products, of_tokens=of_tokens)
        rows = groups.gather(x) if of_tokens else x
        out = rows.new_empty(len(rows), panels[0].columns)
        for group, first, end in groups.bounds:
            out[first:end] = self._products.multiply_packed(rows[first:end], panels[group])
        return out

    def multiply_by_head(self, hidden: Tensor) -> Tensor:
        """Compute logits without bias: hidden @ head.T. [N, H] -> [N, rows of the head] float32"""
        assert self._head is not None, "only a language model's last stage has a vocabulary"
        if self._packed_head is None:
            return self._products.matmul_nt_float32(hidden, self._head)
        logits = self._products.multiply_packed(hidden, self._packed_head)
        # Training rounds them on a CPU, but for exact products.
        return logits if self._products.exact else logits.to(hidden.dtype).float()


def _multiply_by(panels: Mapping[int, Panels], products: Products) -> Multiply:
    """Make the function that computes x @ weight.T + bias with the packed matrix of a weight, if it has one.

    It refers to no object that refers to it, so that packed matrices are freed as soon as the call has ended.
    """

    def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        packed = panels.get(id(weight))
        if packed is None:
            return linear(x, weight, bias, products)
        # Rounded before the bias is added, as training does.
        out = products.multiply_packed(x, packed).to(x.dtype)
        return out if bias is None else out.add_(bias)

    return multiply
