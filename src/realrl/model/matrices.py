"""Matrices of a shard, and how a pass multiplies by them: as they are stored, or prepared for decode steps."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from torch import Tensor

from realrl.model.adapter import Adapter, StackAdapter, adapt
from realrl.model.arithmetic.grouped import (
    Groups,
    add_biases,
    add_low_rank,
    grouped_linear,
    has_grouped_kernel,
)
from realrl.model.arithmetic.ops import Multiply, Products, linear
from realrl.model.cpu.products import Panels
from realrl.model.gpu.path import on_gpu
from realrl.model.quantised import QuantisedMatrix, multiply_widened, widen_if_quantised


class Matrices:
    """Matrices of a shard in their stored form, with their adapters. Products with them are differentiable.

    `adapters` and `quantised` are keyed by the `id` of the matrix that they belong to, `stack_adapters` by the `id`
    of the matrices of all experts.
    """

    gathers_tokens = False
    """Whether ranks that divide experts gather all tokens, instead of sending each token to its experts."""

    def __init__(
        self,
        products: Products,
        adapters: Mapping[int, Adapter],
        quantised: Mapping[int, QuantisedMatrix],
        stack_adapters: Mapping[int, StackAdapter] | None = None,
    ) -> None:
        self.multiply = adapt(multiply_widened(partial(linear, products=products), quantised), adapters)
        """Compute x @ weight.T + bias."""
        self._products, self._quantised, self._stack_adapters = products, quantised, stack_adapters or {}

    def multiply_groups(self, x: Tensor, stack: Tensor, groups: Groups, *, of_tokens: bool = False) -> Tensor:
        """Multiply each row by the matrix of its group, with its adapter if it has one; see `grouped_linear`."""
        out, adapter = self._multiply_stack(x, stack, groups, of_tokens), self._stack_adapters.get(id(stack))
        if adapter is None:
            return out
        a, b, scale = adapter.a, adapter.b, adapter.scale
        return add_low_rank(out, x, a, b, scale, groups, self._products, of_tokens=of_tokens)

    def _multiply_stack(self, x: Tensor, stack: Tensor, groups: Groups, of_tokens: bool) -> Tensor:
        stack = widen_if_quantised(stack, self._quantised, x.dtype)
        return grouped_linear(x, stack, groups, self._products, of_tokens=of_tokens)

    def add_biases(self, rows: Tensor, biases: Tensor, weights: Tensor, groups: Groups) -> Tensor:
        """Add to each row the bias of its group, times the row's weight, in place; see `grouped.add_biases`."""
        return add_biases(rows, biases, weights, groups, self._products)


class DecodeWeights(Matrices):
    """Matrices of a shard for the decode steps of one generate call, without gradients.

    On a CPU, matrices are packed if packing makes products of few rows faster, or if products are exact. Packed
    copies, and DoRA's factors, do not follow later changes of the parameters (see `follow_parameters`). Quantised
    matrices are widened for each product instead, because packed copies would take the memory that quantisation
    saves.
    """

    def __init__(
        self,
        weights: Iterable[Tensor],
        head: Tensor | None,
        products: Products,
        adapters: Mapping[int, Adapter] | None = None,
        quantised: Mapping[int, QuantisedMatrix] | None = None,
        stacks: Iterable[Tensor] = (),
        experts: int = 0,
        stack_adapters: Mapping[int, StackAdapter] | None = None,
    ) -> None:
        """`weights` are the matrices of the layers, `head` the matrix of the logits (last stage only), `stacks` the
        matrices of the shard's `experts` experts; all adapters and `quantised` as for `Matrices`."""
        adapters, quantised, stack_adapters = adapters or {}, quantised or {}, stack_adapters or {}
        super().__init__(products, adapters, quantised, stack_adapters)
        panels = {
            id(weight): products.pack(weight)
            for weight in weights
            if products.packs and not on_gpu(weight) and id(weight) not in quantised
        }
        fixed = {number: adapter.fix() for number, adapter in adapters.items()}
        self.multiply = adapt(multiply_widened(_multiply_by(panels, products), quantised), fixed)
        self._head = head
        self._stacks: dict[int, Sequence[Panels]] = {}
        # The host need not know how many tokens an expert has. But the sums have another order than in training.
        self.gathers_tokens = not products.exact
        self.runs_ahead = True
        """Whether the host can launch decode steps without reading from the device; CUDA graphs need this."""
        for stack in stacks:
            assert experts, "only mixtures have stacks"
            of_experts = stack.view(experts, -1, stack.shape[1])
            if on_gpu(stack):
                adapter = stack_adapters.get(id(stack))
                for matrices in (stack,) if adapter is None else (stack, adapter.a, adapter.b):
                    each = matrices.view(experts, -1, matrices.shape[1])
                    self.runs_ahead &= has_grouped_kernel(each, products)
            elif products.packs and id(stack) not in quantised:
                self._stacks[id(stack)] = [products.pack(weight) for weight in of_experts]
        packs_head = products.packs and head is not None and not on_gpu(head)
        self._packed_head = products.pack(head) if head is not None and packs_head else None
        packed = panels or self._stacks or packs_head
        scaled = any(adapter.magnitude is not None for adapter in adapters.values())
        self.follow_parameters = not packed and not scaled
        """Whether the matrices stay valid when parameters change at the same addresses."""

    def _multiply_stack(self, x: Tensor, stack: Tensor, groups: Groups, of_tokens: bool) -> Tensor:
        panels = self._stacks.get(id(stack))
        if panels is None:
            return super()._multiply_stack(x, stack, groups, of_tokens)
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
        # On a CPU, training rounds logits to the model's type, unless products are exact. Sampling must do the
        # same.
        return logits if self._products.exact else logits.to(hidden.dtype).float()


def _multiply_by(panels: Mapping[int, Panels], products: Products) -> Multiply:
    """Make a function that computes x @ weight.T + bias, with the packed copy of a weight if there is one.

    The result is a closure, because a bound method would create a reference cycle. Without a cycle, packed copies
    are freed when the generate call ends.
    """

    def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        packed = panels.get(id(weight))
        if packed is None:
            return linear(x, weight, bias, products)
        # The product is rounded before the bias is added, as in training.
        out = products.multiply_packed(x, packed).to(x.dtype)
        return out if bias is None else out.add_(bias)

    return multiply
