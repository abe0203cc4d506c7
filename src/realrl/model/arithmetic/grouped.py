"""Grouped products for experts. Rows are copies of tokens, and each group of rows is multiplied by the matrix of
its expert."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from realrl.model.arithmetic.autograd import apply_function
from realrl.model.arithmetic.ops import LeftOut, Products, find_gradient
from realrl.model.gpu.path import has_grouped_products, load_kernels, on_gpu

_ALIGNMENT = 16
"""Alignment in bytes that torch's grouped kernel requires of rows and addresses."""


@dataclass(frozen=True, eq=False)
class Groups:
    """Copies of tokens, sorted by expert. A token has one copy for each of its experts.

    T tokens with k experts each give R = T * k rows.
    """

    order: Tensor
    """Which copy each row holds, as a number: token * k + the expert's index among the token's experts. [R]"""
    places: Tensor
    """The row of each copy. [R]"""
    ends: Tensor
    """The end of each group: the first row after it. [E] int32"""
    copies: int
    """k, the number of experts per token."""
    has_others: bool = False
    """Whether rows behind the last group belong to experts of other ranks."""

    @classmethod
    def of(cls, experts: Tensor, count: int, *, has_others: bool = False) -> "Groups":
        """Group tokens by expert; `count` is the number of experts, and with `has_others`, this number stands for
        experts of other ranks. experts: [T, k] int64"""
        flat = experts.flatten()
        numbers, order = flat.sort(stable=True)
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order), device=order.device)
        bounds = torch.arange(count, device=flat.device)
        # The ends stay on the device, because the host need not know how many rows a group has.
        ends = torch.searchsorted(numbers, bounds, right=True).int()
        return cls(order, places, ends, experts.shape[1], has_others)

    @cached_property
    def tokens(self) -> Tensor:
        """Token of each row. [R]"""
        return self.order // self.copies

    @cached_property
    def bounds(self) -> list[tuple[int, int, int]]:
        """(group, first row, end) of each group that has rows, on the host."""
        ends = self.ends.tolist()
        return [
            (group, first, end)
            for group, (first, end) in enumerate(zip([0, *ends], ends, strict=False))
            if first < end
        ]

    @cached_property
    def numbers(self) -> Tensor:
        """Group of each row; the last one for rows behind it. [R]"""
        rows = torch.arange(len(self.order), dtype=torch.int32, device=self.order.device)
        found = torch.searchsorted(self.ends, rows, right=True)
        return found.clamp(max=len(self.ends) - 1) if self.has_others else found

    def clear_others(self, rows: Tensor) -> Tensor:
        """Set the rows of experts of other ranks to zero, in place. Products leave them undefined. [R, K]"""
        others = torch.arange(len(rows), device=rows.device) >= self.ends[-1]
        return rows.masked_fill_(others[:, None], 0.0)

    def gather(self, x: Tensor) -> Tensor:
        """Copy tokens to their rows, without gradient. [T, K] -> [R, K]"""
        return x.index_select(0, self.tokens)

    def sum_copies(self, rows: Tensor) -> Tensor:
        """Sum the rows of each token in the order of its experts, without gradient. [R, K] -> [T, K]"""
        ordered = rows.index_select(0, self.places)
        return ordered if self.copies == 1 else ordered.view(-1, self.copies, rows.shape[1]).sum(1)


def has_grouped_kernel(weights: Tensor, products: Products) -> bool:
    """Check whether one kernel multiplies all groups, so that the host need not know their sizes.

    The kernel takes bfloat16 on a GPU, in aligned rows. weights: [E, M, K]
    """
    aligned = _ALIGNMENT // weights.element_size()
    return (
        on_gpu(weights)
        and weights.dtype == torch.bfloat16
        and not products.exact
        and not any(number % aligned for number in (*weights.shape[1:], weights.storage_offset()))
        and has_grouped_products(weights.device)
    )


def _multiply(products: Products, x: Tensor, weights: Tensor, groups: Groups, *, forward: bool) -> Tensor:
    """Compute x @ weights[group].T row by row, without gradient. x: [R, K], weights: [E, M, K] -> [R, M]"""
    if has_grouped_kernel(weights, products) and len(x):
        return F.grouped_mm(x, weights.transpose(1, 2), offs=groups.ends)
    out = x.new_empty(len(x), weights.shape[1])
    multiply = products.forward_nt if forward else products.matmul_nt
    for group, first, end in groups.bounds:
        out[first:end] = multiply(x[first:end], weights[group])
    return out


def _add_gradients(
    products: Products, grad: Tensor, x: Tensor, weights: Tensor, groups: Groups, into: Tensor
) -> None:
    """Add the gradients of weights [E, M, K]. grad: [R, M], x: [R, K], into: [E, M, K] float32"""
    if has_grouped_kernel(weights, products):
        # torch's kernel returns bfloat16, so each gradient would be rounded before it is added.
        load_kernels().grouped_gradient.add_grouped_gradient(grad, x.contiguous(), groups.ends, into)
        return
    for group, first, end in groups.bounds:
        products.add_weight_gradient(grad[first:end], x[first:end], into[group])


class _GroupedLinear(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, stack: Tensor, groups: Groups, products: Products, of_tokens: bool
    ) -> Tensor:
        ctx.save_for_backward(x, stack)
        ctx.groups, ctx.products, ctx.of_tokens = groups, products, of_tokens
        rows = groups.gather(x) if of_tokens else x
        return _multiply(products, rows, split_stack(stack, groups), groups, forward=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        x, stack = ctx.saved_tensors
        groups: Groups = ctx.groups
        need_x, need_stack, *_ = ctx.needs_input_grad
        grad, weights = grad.contiguous(), split_stack(stack, groups)
        if need_stack:
            products, of_tokens, into = ctx.products, ctx.of_tokens, split_stack(find_gradient(stack), groups)

            def add() -> None:
                # Rows are gathered again rather than saved, because they take k times the memory of the tokens.
                rows = groups.gather(x) if of_tokens else x
                _add_gradients(products, grad, rows, weights, groups, into)

            LeftOut.compute_or_add(add)
        if not need_x:
            return None, None, None, None, None
        grad_x = _multiply(ctx.products, grad, weights.transpose(1, 2), groups, forward=False)
        return groups.sum_copies(grad_x) if ctx.of_tokens else grad_x, None, None, None, None


def split_stack(stack: Tensor, groups: Groups) -> Tensor:
    """View a stack of matrices as one matrix per group. [E * M, K] -> [E, M, K]"""
    return stack.view(len(groups.ends), -1, stack.shape[1])


def grouped_linear(
    x: Tensor, stack: Tensor, groups: Groups, products: Products, *, of_tokens: bool = False
) -> Tensor:
    """Multiply each row by its group's matrix. x: [R, K] or, with `of_tokens`, [T, K] -> [R, M]

    stack: [E * M, K], a parameter or a tensor without gradient; its gradient is added to `stack.grad`.
    """
    return apply_function(_GroupedLinear, x, stack, groups, products, of_tokens)


class _Rows(NamedTuple):
    """How `_AddLowRank` multiplies rows."""

    products: Products
    tokens: bool
    """Whether rows are copies of tokens, which are made for each product."""


class _AddLowRank(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, out: Tensor, a: Tensor, b: Tensor, scale: float, groups: Groups, of: _Rows
    ) -> Tensor:
        rows = groups.gather(x) if of.tokens else x
        inner = _multiply(of.products, rows, split_stack(a, groups), groups, forward=True).mul_(scale)
        del rows
        out += _multiply(of.products, inner, split_stack(b, groups), groups, forward=True)
        ctx.save_for_backward(x, inner, a, b)
        ctx.scale, ctx.groups, ctx.of = scale, groups, of
        ctx.mark_dirty(out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor, None, None, None, None, None]:
        x, inner, a, b = ctx.saved_tensors
        groups, of = ctx.groups, ctx.of
        need_x, _, need_a, need_b, *_ = ctx.needs_input_grad
        grad, of_a, of_b = grad.contiguous(), split_stack(a, groups), split_stack(b, groups)
        if need_b:
            _add_gradients(of.products, grad, inner, of_b, groups, split_stack(find_gradient(b), groups))
        grad_inner = _multiply(of.products, grad, of_b.transpose(1, 2), groups, forward=False).mul_(ctx.scale)
        if need_a:
            rows = groups.gather(x) if of.tokens else x
            _add_gradients(of.products, grad_inner, rows, of_a, groups, split_stack(find_gradient(a), groups))
            del rows
        if not need_x:
            return None, grad, None, None, None, None, None
        grad_x = _multiply(of.products, grad_inner, of_a.transpose(1, 2), groups, forward=False)
        return groups.sum_copies(grad_x) if of.tokens else grad_x, grad, None, None, None, None, None


def add_low_rank(
    out: Tensor,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    scale: float,
    groups: Groups,
    products: Products,
    *,
    of_tokens: bool = False,
) -> Tensor:
    """Add scale * x Aᵀ Bᵀ to the rows of `grouped_linear`, in place, with A and B of each row's group.

    out: [R, M], x: as for `grouped_linear`, a: [E * rank, K], b: [E * M, rank]. The gradients of `a` and `b` are
    added to their `grad`.
    """
    return apply_function(_AddLowRank, x, out, a, b, scale, groups, _Rows(products, of_tokens))


class _AddBiases(Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, biases: Tensor, weights: Tensor, groups: Groups, products: Products
    ) -> Tensor:
        ctx.save_for_backward(biases, weights)
        ctx.groups, ctx.products = groups, products
        ctx.mark_dirty(rows)
        of_groups = biases.view(-1, rows.shape[1])
        if on_gpu(rows):
            load_kernels().elementwise.add_biases(rows, of_groups, groups.numbers, weights)
        else:
            for group, first, end in groups.bounds:
                rows[first:end] += weights[first:end, None] * of_groups[group].float()
        return rows

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor | None, None, None]:
        biases, weights = ctx.saved_tensors
        _, need_biases, need_weights, *_ = ctx.needs_input_grad
        of_groups = biases.view(-1, grad.shape[1])
        numbers = ctx.groups.numbers[:, None]
        if need_biases:
            # A product with a matrix of weights sums the rows of each group in a fixed order. [R, E]
            placed = weights.new_zeros(len(grad), len(of_groups)).scatter_(1, numbers, weights[:, None])
            into = find_gradient(biases).view_as(of_groups)
            ctx.products.add_weight_gradient(placed.to(grad.dtype), grad, into)
        if not need_weights:
            return grad, None, None, None, None
        grad_weights = ctx.products.matmul_nt(grad, of_groups.to(grad.dtype)).gather(1, numbers)
        return grad, None, grad_weights.squeeze(1).to(weights.dtype), None, None


def add_biases(rows: Tensor, biases: Tensor, weights: Tensor, groups: Groups, products: Products) -> Tensor:
    """Add to each row the bias of its group, times the row's weight, in place. rows: [R, M], weights: [R] float32

    biases: [E * M], a parameter or a tensor without gradient; its gradient is added to `biases.grad`.
    """
    return apply_function(_AddBiases, rows, biases, weights, groups, products)


class _GatherWeighed(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, groups: Groups) -> Tensor:
        ctx.save_for_backward(x, weights)
        ctx.groups = groups
        return groups.gather(x).mul_(weights.to(x.dtype)[:, None])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weights = ctx.saved_tensors
        # Rows are gathered again rather than saved, as for the gradients of matrices.
        grad_weights = ctx.groups.gather(x).mul_(grad).sum(1, dtype=weights.dtype)
        grad_x = ctx.groups.sum_copies(grad * weights.to(grad.dtype)[:, None])
        return grad_x, grad_weights, None


def gather_weighed(x: Tensor, weights: Tensor, groups: Groups) -> Tensor:
    """Copy tokens to their rows, and multiply each row by its weight. x: [T, K], weights: [R] -> [R, K]"""
    return apply_function(_GatherWeighed, x, weights, groups)


class _GatherCopies(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, groups: Groups) -> Tensor:
        ctx.groups = groups
        return groups.gather(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.groups.sum_copies(grad), None


def gather_copies(x: Tensor, groups: Groups) -> Tensor:
    """Copy tokens to their rows. [T, K] -> [R, K]"""
    return apply_function(_GatherCopies, x, groups)


class _SumCopies(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, groups: Groups) -> Tensor:
        ctx.groups = groups
        return groups.sum_copies(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.groups.gather(grad), None


def sum_copies(rows: Tensor, groups: Groups) -> Tensor:
    """Sum the rows of each token. [R, K] -> [T, K]"""
    return apply_function(_SumCopies, rows, groups)
