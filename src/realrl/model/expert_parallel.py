"""Communication of ranks that divide the experts of a layer among themselves (expert parallelism).

Each rank sends its tokens to the ranks that hold their experts, and gets the outputs of the experts back (GShard,
arXiv 2006.16668). A rank may get any number of tokens, and no token is dropped.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from realrl.model.arithmetic.autograd import apply_function
from realrl.model.arithmetic.grouped import Groups, gather_copies
from realrl.model.group import Group, all_to_all


@dataclass(frozen=True, eq=False)
class Dispatch:
    """Exchange of the copies of tokens in one layer. Every rank of `group` holds the same number of experts.

    A rank sends its copies sorted by expert, so those for one rank are consecutive. It receives R' copies, first
    those of the first rank, each rank's sorted by expert.
    """

    group: Group
    own: Groups
    """Copies of this rank's tokens, grouped by expert."""
    arriving: Groups
    """Arriving copies, grouped by this rank's experts."""
    sent: Sequence[int]
    """Number of copies that this rank sends to each rank."""
    received: Sequence[int]
    """Number of copies that this rank receives from each rank."""

    @classmethod
    def of(cls, experts: Tensor, count: int, group: Group) -> "Dispatch":
        """Agree with the other ranks on the number of copies; `count` is the number of experts in the layer.
        experts: [T, k] int64, the experts of this rank's tokens"""
        own = Groups.of(experts, count)
        sent = torch.diff(own.ends, prepend=own.ends.new_zeros(1)).long().view(group.size, -1)
        every = [1] * group.size
        received = all_to_all(sent, every, every, group)
        # The host must know the sizes of messages.
        to_ranks, from_ranks = torch.stack((sent.sum(1), received.sum(1))).tolist()
        numbers = torch.arange(sent.shape[1], device=sent.device).repeat(group.size)
        arrived = numbers.repeat_interleave(received.flatten(), output_size=sum(from_ranks))
        return cls(group, own, Groups.of(arrived[:, None], sent.shape[1]), to_ranks, from_ranks)

    def send(self, x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Send the copies of tokens to the ranks of their experts, with their weights.

        x: [T, H], weights: [T * k] -> arriving copies [R', H] and their weights [R']
        """
        rows = gather_copies(x, self.own)
        return apply_function(_Exchange, rows, weights.index_select(0, self.own.order), self)

    def send_back(self, rows: Tensor) -> Tensor:
        """Send the outputs of this rank's experts back to the ranks of their tokens. [R', H] -> [R, H]"""
        return apply_function(_Return, rows, self)

    def move(self, rows: Tensor) -> Tensor:
        """Move copies to the ranks of their experts, without gradient."""
        return all_to_all(rows, self.sent, self.received, self.group)

    def move_back(self, rows: Tensor) -> Tensor:
        """Move copies back from the ranks of their experts, without gradient."""
        return all_to_all(rows, self.received, self.sent, self.group)


class _Exchange(Function):
    """Exchange of copies and their weights. One function does both, so that all ranks do the exchanges of the
    backward pass in the same order."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, dispatch: Dispatch) -> tuple[Tensor, Tensor]:
        ctx.dispatch = dispatch
        return dispatch.move(rows), dispatch.move(weights)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_weights: Tensor) -> tuple[Tensor, Tensor, None]:
        return ctx.dispatch.move_back(grad), ctx.dispatch.move_back(grad_weights), None


class _Return(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, dispatch: Dispatch) -> Tensor:
        ctx.dispatch = dispatch
        return dispatch.move_back(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.dispatch.move(grad), None
