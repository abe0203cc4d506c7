"""Communication of TP ranks around column- and row-parallel matrices.

A column-parallel matrix holds some of the outputs, a row-parallel one some of the inputs; between the two, each
rank computes its own part (Megatron-LM, arXiv 1909.08053). With sequence parallelism the residual stream is cut
by tokens as well, so that all-reduces become reduce-scatters and all-gathers (arXiv 2205.05198).
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
    """TP ranks of a forward pass over `tokens` tokens in all.

    Between layers each rank holds the hidden states of all tokens or, with `sequence`, of an equal part of
    them: ceil(tokens / size) rows, the last ones padding.
    """

    group: Group
    tokens: int
    sequence: bool = False

    def enter(self, x: Tensor) -> Tensor:
        """Copy (with sequence parallelism: gather) hidden states into column-parallel matrices. -> [tokens, H]

        Each rank's gradient is a part of the sum that flows back.
        """
        if self.group.size == 1:
            return x
        if self.sequence:
            return _Gather.apply(x, self.group, self.tokens, True)
        return _Copy.apply(x, self.group)

    def leave(self, partial: Tensor) -> Tensor:
        """Reduce (or reduce-scatter) outputs of row-parallel matrices. [tokens, H] -> what a rank holds of it"""
        if self.group.size == 1:
            return partial
        return _Scatter.apply(partial, self.group) if self.sequence else _Reduce.apply(partial, self.group)

    def whole(self, x: Tensor) -> Tensor:
        """Gather hidden states for layers that are replicated, gradient included. -> [tokens, H]"""
        if self.group.size == 1 or not self.sequence:
            return x
        return _Gather.apply(x, self.group, self.tokens, False)


class _Copy(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.group.sum(grad.contiguous()), None


class _Reduce(Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, group: Group) -> Tensor:
        return group.sum(partial.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _gathered(part: Tensor, group: Group, tokens: int) -> Tensor:
    """All-gather rows. [ceil(tokens / size), H] on each rank -> [tokens, H]"""
    buffer = part.new_empty(group.size * len(part), *part.shape[1:])
    all_gather(buffer, part.contiguous(), group)
    return buffer[:tokens]


def _scattered(partial: Tensor, group: Group) -> Tensor:
    """Reduce-scatter rows, padded at the end. [tokens, H] -> [ceil(tokens / size), H] on each rank"""
    rows = -(-len(partial) // group.size)
    padded = F.pad(partial, (0, 0, 0, rows * group.size - len(partial))).contiguous()
    part = partial.new_empty(rows, *partial.shape[1:])
    reduce_scatter(part, padded, group)
    return part


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Group, tokens: int, partial_gradient: bool) -> Tensor:
        ctx.group, ctx.rows, ctx.partial_gradient = group, len(part), partial_gradient
        return _gathered(part, group, tokens)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        if ctx.partial_gradient:
            return _scattered(grad, ctx.group), None, None, None
        start = ctx.group.index * ctx.rows
        mine = grad[start : start + ctx.rows]
        return F.pad(mine, (0, 0, 0, ctx.rows - len(mine))), None, None, None


class _Scatter(Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, group: Group) -> Tensor:
        ctx.group, ctx.tokens = group, len(partial)
        return _scattered(partial, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _gathered(grad, ctx.group, ctx.tokens), None
