"""Communication of TP ranks around column- and row-parallel matrices.

Each rank holds a column-parallel matrix for some of its outputs, and a row-parallel matrix for some of its inputs.
Between the two matrices, each rank computes its own part (Megatron-LM, arXiv 1909.08053). Sequence parallelism also
divides the tokens of the residual stream, so that all-reduces become reduce-scatters and all-gathers (arXiv
2205.05198).
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from realrl.model.group import Group, all_gather, reduce_scatter


@dataclass(frozen=True)
class TensorParallel:
    """Communication of the TP ranks in a forward pass over `tokens` tokens.

    Between layers, each rank holds the hidden states of all tokens. With `sequence_parallel`, it holds an equal
    part: ceil(tokens / size) rows, padded at the end.
    """

    group: Group
    tokens: int
    sequence_parallel: bool = False

    def copy_to_region(self, x: Tensor) -> Tensor:
        """Pass hidden states to column-parallel matrices; with sequence parallelism, gather them first. ->
        [tokens, H]

        This is Megatron's f (`copy_to_tensor_model_parallel_region`, `gather_from_sequence_parallel_region`). The
        backward pass sums the gradients of the ranks.
        """
        if self.group.size == 1:
            return x
        if self.sequence_parallel:
            return _GatherFromRegion.apply(x, self.group, self.tokens, True)
        return _CopyToRegion.apply(x, self.group)

    def reduce_from_region(self, partial: Tensor) -> Tensor:
        """Sum outputs of row-parallel matrices over the ranks; with sequence parallelism, reduce-scatter them.
        partial: [tokens, H] -> this rank's rows of the sum

        This is Megatron's g (`reduce_from_tensor_model_parallel_region`,
        `reduce_scatter_to_sequence_parallel_region`).
        """
        if self.group.size == 1:
            return partial
        return (
            _ReduceScatterToRegion.apply(partial, self.group)
            if self.sequence_parallel
            else sum_parts(partial, self.group)
        )

    @property
    def divides_rows(self) -> bool:
        """Whether each rank holds only some rows of hidden states between layers."""
        return self.sequence_parallel and self.group.size > 1

    @property
    def own(self) -> slice:
        """Rows of this rank if the ranks divide tokens. The last ranks may have fewer than others."""
        rows = -(-self.tokens // self.group.size)
        return slice(
            min(self.group.index * rows, self.tokens), min((self.group.index + 1) * rows, self.tokens)
        )

    def gather_parts(self, own: Tensor) -> Tensor:
        """Gather what each rank has computed for its own rows, if each rank then computes something else with all
        of it. The backward pass sums the gradients of the ranks. [rows of `own`, C] -> [tokens, C]"""
        rows = -(-self.tokens // self.group.size)
        return _GatherFromRegion.apply(F.pad(own, (0, 0, 0, rows - len(own))), self.group, self.tokens, True)

    def place_own(self, own: Tensor) -> Tensor:
        """Put what this rank has computed for its own tokens among rows of zeros, in the shape of hidden states
        between layers. [rows of `own`, H] -> [rows, H]"""
        first = 0 if self.divides_rows else self.own.start
        rows = -(-self.tokens // self.group.size) if self.divides_rows else self.tokens
        return F.pad(own, (0, 0, first, rows - first - len(own)))

    def own_rows(self, values: Tensor) -> Tensor:
        """Select the values of the tokens whose hidden states this rank holds. [tokens] -> [rows], padded with
        zeros"""
        if self.group.size == 1 or not self.sequence_parallel:
            return values
        rows = -(-self.tokens // self.group.size)
        own = values[self.group.index * rows :][:rows]
        return F.pad(own, (0, rows - len(own)))

    def gather_from_region(self, x: Tensor) -> Tensor:
        """Gather hidden states for layers that every rank computes in full. Gradients are then equal on all ranks.
        -> [tokens, H]

        This is Megatron's `gather_from_sequence_parallel_region` with `tensor_parallel_output_grad=False`.
        """
        if self.group.size == 1 or not self.sequence_parallel:
            return x
        return _GatherFromRegion.apply(x, self.group, self.tokens, False)


def sum_parts(partial: Tensor, group: Group) -> Tensor:
    """Sum over ranks what each of them has a part of, if all ranks then compute the same with the sum."""
    return _ReduceFromRegion.apply(partial, group)


class _CopyToRegion(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.group.sum(grad.contiguous()), None


class _ReduceFromRegion(Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, group: Group) -> Tensor:
        # The sum is in place, and autograd must not see its input change.
        return group.sum(partial.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _all_gather_rows(part: Tensor, group: Group, tokens: int) -> Tensor:
    """All-gather rows. [ceil(tokens / size), H] on each rank -> [tokens, H]"""
    buffer = part.new_empty(group.size * len(part), *part.shape[1:])
    all_gather(buffer, part.contiguous(), group)
    return buffer[:tokens]


def _reduce_scatter_rows(partial: Tensor, group: Group) -> Tensor:
    """Reduce-scatter rows, padded at the end. [tokens, H] -> [ceil(tokens / size), H] on each rank"""
    rows = -(-len(partial) // group.size)
    padded = F.pad(partial, (0, 0, 0, rows * group.size - len(partial))).contiguous()
    part = partial.new_empty(rows, *partial.shape[1:])
    reduce_scatter(part, padded, group)
    return part


class _GatherFromRegion(Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Group, tokens: int, partial_gradient: bool) -> Tensor:
        ctx.group = group
        ctx.rows = len(part)
        ctx.partial_gradient = partial_gradient
        return _all_gather_rows(part, group, tokens)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        if ctx.partial_gradient:
            return _reduce_scatter_rows(grad, ctx.group), None, None, None
        start = ctx.group.index * ctx.rows
        local_grad = grad[start : start + ctx.rows]
        return F.pad(local_grad, (0, 0, 0, ctx.rows - len(local_grad))), None, None, None


class _ReduceScatterToRegion(Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, group: Group) -> Tensor:
        ctx.group = group
        ctx.tokens = len(partial)
        return _reduce_scatter_rows(partial, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all_gather_rows(grad, ctx.group, ctx.tokens), None
