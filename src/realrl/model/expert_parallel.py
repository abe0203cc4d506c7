"""Communication of ranks that divide the experts of a layer among themselves (expert parallelism).

Each rank sends its tokens to the ranks that hold their experts, and gets the outputs of the experts back (GShard,
arXiv 2006.16668). A rank may get any number of tokens, and no token is dropped.

What is computed between the start and the end of an exchange can hide it, as Megatron's
`--moe-shared-expert-overlap` does. The backward pass visits operations in the reverse order of their creation. It
starts to send gradients at the end of an exchange, and waits for them at its start. So the operations in between
hide this exchange, too.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from realrl.model.arithmetic.autograd import apply_function
from realrl.model.arithmetic.grouped import Groups, gather_copies, sum_copies
from realrl.model.group import Group, all_to_all


@dataclass(frozen=True, eq=False)
class Dispatch:
    """Exchange of the copies of tokens in one layer. Every rank of `group` holds the same number of experts.

    A rank sends its copies sorted by expert, so those for one rank are consecutive. It receives R' copies, first
    those of the first rank, each rank's sorted by expert. `send`, `receive`, `send_back` and `receive_back` follow
    each other. The first and the third only start an exchange.
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
    overlaps: bool
    """Whether something is computed while rows are on their way. If not, an exchange starts and ends at once."""
    rows: list[Tensor]
    """What is sent next, or on its way. No other object holds it, so that it is freed early."""
    works: list[dist.Work] = field(default_factory=list)
    """The messages on their way."""

    @classmethod
    def of(
        cls, x: Tensor, weights: Tensor, experts: Tensor, count: int, group: Group, *, overlaps: bool
    ) -> "Dispatch":
        """Agree with the other ranks on the number of copies, and gather the copies to send, with their weights.

        x: [T, H], this rank's tokens; weights, experts: [T, k], those of each token, float32 and int64; `count` is
        the number of experts in the layer
        """
        own = Groups.of(experts, count)
        sent = torch.diff(own.ends, prepend=own.ends.new_zeros(1)).long().view(group.size, -1)
        every = [1] * group.size
        received = torch.empty_like(sent)
        all_to_all(received, sent, every, every, group)
        # The host must know the sizes of messages.
        to_ranks, from_ranks = torch.stack((sent.sum(1), received.sum(1))).tolist()
        numbers = torch.arange(sent.shape[1], device=sent.device).repeat(group.size)
        arrived = numbers.repeat_interleave(received.flatten(), output_size=sum(from_ranks))
        arriving = Groups.of(arrived[:, None], sent.shape[1])
        rows = [gather_copies(x, own), weights.flatten().index_select(0, own.order)]
        return cls(group, own, arriving, to_ranks, from_ranks, overlaps, rows)

    def send(self) -> None:
        """Start to send the copies of this rank's tokens to the ranks of their experts, with their weights."""
        self.rows[:] = apply_function(_Start, self, False, *self.rows)

    def receive(self) -> tuple[Tensor, Tensor]:
        """Wait for the copies of `send`. -> arriving copies [R', H] and their weights [R']"""
        rows, weights = self._receive(back=False)
        return rows, weights

    def send_back(self, rows: Tensor) -> None:
        """Start to send the outputs of this rank's experts back to the ranks of their tokens. rows: [R', H]"""
        self.rows[:] = apply_function(_Start, self, True, rows)

    def receive_back(self) -> Tensor:
        """Wait for the outputs of `send_back`, and sum those of each token. -> [T, H]"""
        (rows,) = self._receive(back=True)
        return sum_copies(rows, self.own)

    def start(self, rows: Tensor, *, back: bool) -> Tensor:
        """Start to move copies to the ranks of their experts, or `back`, without gradient. Returns what has arrived
        when `wait` returns."""
        sent, received = (self.received, self.sent) if back else (self.sent, self.received)
        found = rows.new_empty(sum(received), *rows.shape[1:])
        work = all_to_all(found, rows, sent, received, self.group, async_op=self.overlaps)
        if work is not None:
            self.works.append(work)
        return found

    def wait(self) -> None:
        """Wait for all messages on their way. On a GPU, the stream waits, and the host does not."""
        for work in self.works:
            work.wait()
        self.works.clear()

    def _receive(self, *, back: bool) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = apply_function(_End, self, back, *self.rows)
        self.rows.clear()
        return found


class _Start(Function):
    """Start of an exchange, which moves several tensors in a fixed order. In the backward pass, it is the end."""

    @staticmethod
    def forward(ctx: Any, dispatch: Dispatch, back: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.dispatch = dispatch
        return tuple(dispatch.start(tensor, back=back) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # Autograd demands gradients in the shapes of what has arrived, so `grads` are not those of `rows`.
        dispatch: Dispatch = ctx.dispatch
        dispatch.wait()
        found = tuple(dispatch.rows)
        dispatch.rows.clear()
        return None, None, *found


class _End(Function):
    """End of an exchange. In the backward pass, it is the start, and gradients move the other way."""

    @staticmethod
    def forward(ctx: Any, dispatch: Dispatch, back: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.dispatch, ctx.back = dispatch, back
        dispatch.wait()
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dispatch: Dispatch = ctx.dispatch
        dispatch.rows[:] = [dispatch.start(grad, back=not ctx.back) for grad in grads]
        return None, None, *grads
