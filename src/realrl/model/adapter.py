"""Low-rank adapters (LoRA, DoRA): what they add to the product of a matrix, and the row norms of DoRA."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from realrl.families.adapters import (
    LORA_A,
    LORA_B,
    MAGNITUDES,
    STACKS_A,
    STACKS_B,
    AdaptedMatrix,
    LowRank,
    is_adapted,
    list_modules,
)
from realrl.families.tensors import Parameter, TensorSpec
from realrl.model.arithmetic.autograd import apply_function
from realrl.model.arithmetic.ops import Multiply, Products, find_gradient
from realrl.model.group import Group


@dataclass(frozen=True, eq=False)
class Adapter:
    """One TP rank's part of the adapter of a matrix. Such a matrix may be stacked from several modules (q, k and
    v). Each adapted module is a block of rows with its own A and B."""

    weight: Tensor
    """The frozen matrix. [M, K]"""
    a: Tensor
    """LoRA's matrix A of each block, stacked. [blocks * rank, K]"""
    b: Tensor
    """LoRA's matrix B of each block, stacked. [rows of all blocks, rank]"""
    blocks: Sequence[range]
    """The adapted rows of the matrix, block by block."""
    scale: float
    products: Products
    magnitude: Tensor | None = None
    """DoRA only: the norm that each adapted row is scaled to. [rows of all blocks]"""
    column_group: Group | None = None
    """TP ranks that hold the other columns of the matrix; None if this rank has whole rows."""
    factors: Tensor | None = None
    """DoRA's factors, if they are computed in advance (see `fix`). [M]"""

    def multiply(self, x: Tensor, bias: Tensor | None, multiply: Multiply) -> Tensor:
        """Multiply by the adapted matrix and add a bias. x: [N, K] -> [N, M]"""
        if self.magnitude is None:
            return self._add(x, multiply(x, self.weight, bias))
        factors = self.compute_factors() if self.factors is None else self.factors
        out = self._add(x, multiply(x, self.weight, None)) * factors
        return out if bias is None else out + bias

    def fix(self) -> "Adapter":
        """Return an adapter that does not compute DoRA's factors again. It is valid until parameters change."""
        return self if self.magnitude is None else replace(self, factors=self.compute_factors().detach())

    def compute_factors(self) -> Tensor:
        """Compute DoRA's factor for each row of the matrix: its magnitude / its norm. Rows without an adapter get
        1. -> [M]

        The gradient treats the norms as constants (arXiv 2402.09353, section 4.3).
        """
        assert self.magnitude is not None, "only DoRA has magnitudes"
        norms = self.compute_norms().to(self.magnitude.dtype)
        found = self.magnitude / norms
        if len(found) == len(self.weight):
            return found
        factors = found.new_ones(len(self.weight))
        return factors.index_copy(0, self._rows, found)

    @torch.no_grad()
    def compute_norms(self) -> Tensor:
        """Compute the norms of the adapted rows of weight + scale * B A. -> [rows of all blocks] float32

        The sum of the two matrices is never computed. For rows w and b, |w + s b A|² = |w|² + 2 s (w Aᵀ) b + s² b
        (A Aᵀ) b.
        """
        squares = []
        for number, (block, b) in enumerate(zip(self.blocks, self._split_b(), strict=True)):
            w = self.weight[block.start : block.stop].float()
            rank = b.shape[1]
            a, wide = self.a[number * rank : (number + 1) * rank].float(), self.scale * b.float()
            squares.append(w.square().sum(1) + (wide * (2 * (w @ a.T) + wide @ (a @ a.T))).sum(1))
        total = torch.cat(squares)
        if self.column_group is not None:
            total = self.column_group.sum(total)
        return total.clamp_(min=0).sqrt_()

    def _split_b(self) -> tuple[Tensor, ...]:
        return self.b.split([len(block) for block in self.blocks])

    @property
    def _rows(self) -> Tensor:
        rows = [torch.arange(block.start, block.stop) for block in self.blocks]
        return torch.cat(rows).to(self.weight.device)

    def _add(self, x: Tensor, out: Tensor) -> Tensor:
        """Add the low-rank part to a product, in place. x: [N, K], out: [N, M] -> out"""
        return apply_function(_AddLowRank, x, out, self.a, self.b, self)


class _AddLowRank(Function):
    """Add scale * x Aᵀ Bᵀ to a product, block by block."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, out: Tensor, a: Tensor, b: Tensor, adapter: Adapter) -> Tensor:
        products, rank = adapter.products, b.shape[1]
        inner = products.forward_nt(x, a).mul_(adapter.scale)
        start = 0
        for number, block in enumerate(adapter.blocks):
            rows = b[start : start + len(block)]
            part = inner[:, number * rank : (number + 1) * rank]
            out[:, block.start : block.stop] += products.forward_nt(part.contiguous(), rows)
            start += len(block)
        ctx.save_for_backward(x, inner, a, b)
        ctx.adapter = adapter
        ctx.mark_dirty(out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor, None, None, None]:
        x, inner, a, b = ctx.saved_tensors
        adapter, products, rank = ctx.adapter, ctx.adapter.products, b.shape[1]
        need_x, _, need_a, need_b, _ = ctx.needs_input_grad
        grad_inner = torch.empty_like(inner)
        start = 0
        for number, block in enumerate(adapter.blocks):
            rows, columns = slice(start, start + len(block)), slice(number * rank, (number + 1) * rank)
            part = grad[:, block.start : block.stop]
            if need_b:
                products.add_weight_gradient(part, inner[:, columns], find_gradient(b)[rows])
            grad_inner[:, columns] = products.matmul_nt(part, b[rows].T)
            start += len(block)
        grad_inner *= adapter.scale
        if need_a:
            products.add_weight_gradient(grad_inner, x, find_gradient(a))
        return products.matmul_nt(grad_inner, a.T) if need_x else None, grad, None, None, None


@dataclass(frozen=True, eq=False)
class StackAdapter:
    """One rank's part of the adapters of the experts in a stack of matrices. Each expert has its own A and B."""

    a: Tensor
    """A of each expert, stacked. [E * rank, K]"""
    b: Tensor
    """B of each expert, stacked. [E * M, rank]"""
    scale: float


def adapt(multiply: Multiply, adapters: Mapping[int, Adapter]) -> Multiply:
    """Wrap `multiply` so that it also applies the adapter of a matrix, if there is one. `adapters` are keyed by the
    `id` of their matrix."""
    if not adapters:
        return multiply

    def adapted(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        adapter = adapters.get(id(weight))
        return multiply(x, weight, bias) if adapter is None else adapter.multiply(x, bias, multiply)

    return adapted


def make_stack_adapters(
    layer: nn.Module, lora: LowRank, parameter: Callable[[Parameter], nn.Parameter | None]
) -> dict[int, StackAdapter]:
    """Register the parameters of experts' adapters in a layer, and return its adapters, keyed by the `id` of their
    stack. `parameter(name)` returns a tensor of an adapter, or None if there is none."""
    found = {}
    for stack in STACKS_A:
        a, b = parameter(STACKS_A[stack]), parameter(STACKS_B[stack])
        if a is not None and b is not None:
            layer.register_parameter(STACKS_A[stack], a)
            layer.register_parameter(STACKS_B[stack], b)
            found[id(getattr(layer, stack))] = StackAdapter(a, b, lora.scale)
    return found


def make_adapters(
    layer: nn.Module,
    tensors: Mapping[AdaptedMatrix, Sequence[TensorSpec]],
    lora: LowRank,
    weights: Callable[..., Tensor],
    parameter: Callable[[Parameter], nn.Parameter | None],
    products: Products,
    tensor_group: Group,
) -> dict[int, Adapter]:
    """Register the adapters' parameters in a layer, and return its adapters, keyed by the `id` of their matrix.

    `tensors` lists the tensors that each matrix is stacked from; `weights(name)` returns this rank's rows of a
    tensor. `parameter(name)` returns a tensor of an adapter, or None if this rank does not have it.
    """
    found = {}
    for matrix, parts in tensors.items():
        names = LORA_A[matrix], LORA_B[matrix], MAGNITUDES[matrix]
        a, b, magnitude = map(parameter, names)
        if a is None or b is None:
            continue
        for name, tensor in zip(names, (a, b, magnitude), strict=True):
            layer.register_parameter(name, tensor)
        blocks, start = [], 0
        for module in list_modules(parts):
            stop = start + sum(len(weights(part.name)) for part in module.parts)
            if is_adapted(module, lora):
                blocks.append(range(start, stop))
            start = stop
        weight = getattr(layer, matrix)
        columns = tensor_group if matrix in ("out", "down") and tensor_group.size > 1 else None
        found[id(weight)] = Adapter(weight, a, b, blocks, lora.scale, products, magnitude, columns)
    return found
