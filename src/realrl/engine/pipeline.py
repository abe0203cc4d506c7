"""What the stages of a pipeline send each other."""

from collections import deque

import torch
import torch.distributed as dist
from torch import Tensor

from realrl.algorithms.method import Metrics
from realrl.model.group import Group

_FORWARD, _BACKWARD, _TOKENS = 1, 2, 3  # tags, where the backend knows them


class Pipeline:
    """This rank's stage. Sends do not wait; receives do.

    Activations and gradients travel over groups of their own, because a backend without tags delivers what one
    pair of ranks exchanges in the order in which it was posted, and the two directions have different orders.
    """

    def __init__(
        self, group: Group, backward: Group, *, hidden_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """`group`: the ranks of the stages, first to last; `backward`: the same ranks over a connection of its
        own."""
        self.group = group
        self._width, self._dtype, self._device = hidden_size, dtype, device
        self._back = backward.handle
        self._pending: deque[tuple[dist.Work, Tensor]] = deque()

    @property
    def first(self) -> bool:
        """Whether this is the first stage."""
        return self.group.index == 0

    @property
    def last(self) -> bool:
        """Whether this is the last stage."""
        return self.group.index == self.group.size - 1

    def receive(self, rows: int) -> Tensor:
        """Activations of the stage before. [rows, H]"""
        return self._receive(rows, -1, self.group.handle, _FORWARD)

    def send(self, hidden: Tensor) -> None:
        """Activations to the next stage."""
        self._send(hidden.detach(), 1, self.group.handle, _FORWARD)

    def receive_gradient(self, rows: int) -> Tensor:
        """The gradient of what was sent to the next stage. [rows, H]"""
        return self._receive(rows, 1, self._back, _BACKWARD)

    def send_gradient(self, gradient: Tensor) -> None:
        """The gradient of what came from the stage before."""
        self._send(gradient, -1, self._back, _BACKWARD)

    def tell(self, tokens: Tensor) -> None:
        """From the last stage, the tokens it has drawn, to all others. [B] int64"""
        for stage in range(self.group.size - 1):
            self._post(tokens, stage, self._back, _TOKENS)

    def hear(self, count: int) -> Tensor:
        """The other side of `tell`. [count] int64"""
        tokens = torch.empty(count, dtype=torch.int64, device=self._device)
        dist.recv(tokens, self.group.ranks[-1], group=self._back, tag=_TOKENS)
        return tokens

    def figures_from_last(self, figures: Metrics) -> Metrics:
        """The last stage's figures, on every stage."""
        if self.group.size == 1:
            return figures
        box = [figures.to_plain() if self.last else None]
        cpu = torch.device("cpu")
        dist.broadcast_object_list(box, self.group.ranks[-1], group=self.group.handle, device=cpu)
        assert box[0] is not None, "the last stage has sent its figures"
        return Metrics.from_plain(box[0])

    def finish(self) -> None:
        """Wait until everything sent has left."""
        while self._pending:
            self._pending.popleft()[0].wait()

    def _receive(self, rows: int, step: int, handle: dist.ProcessGroup | None, tag: int) -> Tensor:
        buffer = torch.empty(rows, self._width, dtype=self._dtype, device=self._device)
        dist.recv(buffer, self.group.ranks[self.group.index + step], group=handle, tag=tag)
        return buffer

    def _send(self, tensor: Tensor, step: int, handle: dist.ProcessGroup | None, tag: int) -> None:
        self._post(tensor.contiguous(), self.group.index + step, handle, tag)

    def _post(self, tensor: Tensor, stage: int, handle: dist.ProcessGroup | None, tag: int) -> None:
        work = dist.isend(tensor, self.group.ranks[stage], group=handle, tag=tag)
        assert work is not None, "a stage is part of its pipeline"
        self._pending.append((work, tensor))
        # Memory of what has surely arrived is given back: more than this many are never under way.
        while len(self._pending) > 4 * self.group.size:
            self._pending.popleft()[0].wait()
