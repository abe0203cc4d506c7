"""Messages between pipeline stages."""

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import torch
import torch.distributed as dist
from torch import Tensor

from realrl.algorithms.method import Metrics
from realrl.layout.limits import SENDS_PER_STAGE
from realrl.model.group import Group

_FORWARD, _BACKWARD, _TOKENS = 1, 2, 3  # tags, where the backend knows them


@dataclass(frozen=True)
class PendingRecv:
    """Pending receive from another stage."""

    work: dist.Work
    tensor: Tensor

    def wait(self) -> Tensor:
        """Wait for the tensor and return it."""
        self.work.wait()
        return self.tensor


class Pipeline:
    """Messages of this rank's stage.

    Sends do not wait. Receives are posted before other computation, so that messages travel meanwhile: gloo holds
    an unmatched send back until its receive is posted.

    Activations and gradients travel over groups of their own, because a backend without tags delivers what one
    pair of ranks exchanges in the order in which it was posted, and the two directions have different orders.
    """

    def __init__(
        self,
        group: Group,
        reverse_group: Group,
        *,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`group`: the ranks of the stages, first to last; `reverse_group`: the same ranks over a connection
        of its own, for what flows against the stages."""
        self.group = group
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._device = device
        self._reverse = reverse_group.handle
        self._sends: deque[tuple[dist.Work, Tensor]] = deque()
        if device.type == "cuda" and group.size > 1:
            self._connect()

    @property
    def first(self) -> bool:
        """Whether a rank is on the first stage."""
        return self.group.index == 0

    @property
    def last(self) -> bool:
        """Whether a rank is on the last stage."""
        return self.group.index == self.group.size - 1

    def post_recv(self, rows: int) -> PendingRecv:
        """Post the receive of activations of the stage before. [rows, H]"""
        return self._irecv(self._empty_hidden(rows), self.group.index - 1, self.group.handle, _FORWARD)

    def send(self, hidden: Tensor) -> None:
        """Send activations to the next stage."""
        self._isend(hidden.detach().contiguous(), self.group.index + 1, self.group.handle, _FORWARD)

    def post_recv_gradient(self, rows: int) -> PendingRecv:
        """Post the receive of the gradient of what is sent to the next stage. [rows, H]"""
        return self._irecv(self._empty_hidden(rows), self.group.index + 1, self._reverse, _BACKWARD)

    def send_gradient(self, gradient: Tensor) -> None:
        """Send the gradient of what came from the stage before."""
        self._isend(gradient.contiguous(), self.group.index - 1, self._reverse, _BACKWARD)

    def post_recv_tokens(self, count: int) -> PendingRecv:
        """Post the receive of the tokens that `broadcast_tokens` sends. [count] int64"""
        tokens = torch.empty(count, dtype=torch.int64, device=self._device)
        return self._irecv(tokens, self.group.size - 1, self._reverse, _TOKENS)

    def broadcast_tokens(self, tokens: Tensor) -> None:
        """Broadcast the sampled tokens from the last stage to all others. [B] int64"""
        for stage in range(self.group.size - 1):
            self._isend(tokens, stage, self._reverse, _TOKENS)

    def broadcast_metrics(self, metrics: Metrics) -> Metrics:
        """Broadcast the last stage's metrics to every stage."""
        if self.group.size == 1:
            return metrics
        source, handle = self.group.ranks[-1], self.group.handle
        text = json.dumps(metrics.to_plain()).encode() if self.last else b""
        size = torch.tensor([len(text)])
        dist.broadcast(size, source, group=handle)
        message = torch.empty(int(size), dtype=torch.uint8)
        if self.last:
            message = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        dist.broadcast(message, source, group=handle)
        return Metrics.from_plain(json.loads(message.numpy().tobytes()))

    def wait_sends(self) -> None:
        """Wait until everything sent has left."""
        while self._sends:
            self._sends.popleft()[0].wait()

    def _connect(self) -> None:
        """Exchange a message with every stage that this one communicates with, one pair after the other.

        NCCL connects two ranks at their first message and waits for both of them, which may take forever while a
        receive is under way that one of them will only send for later.
        """
        last = self.group.size - 1
        # Activations to the next stage, gradients to the one before, tokens from the last stage to all others.
        pairs = [(s, s + 1, self.group.handle) for s in range(last)]
        pairs += [(s + 1, s, self._reverse) for s in range(last)]
        pairs += [(last, s, self._reverse) for s in range(last - 1)]
        message = torch.zeros(1, device=self._device)
        for sender, receiver, handle in pairs:
            if self.group.index == sender:
                dist.send(message, self.group.ranks[receiver], group=handle)
            elif self.group.index == receiver:
                dist.recv(message, self.group.ranks[sender], group=handle)
        torch.cuda.synchronize(self._device)

    def _empty_hidden(self, rows: int) -> Tensor:
        return torch.empty(rows, self._hidden_size, dtype=self._dtype, device=self._device)

    def _irecv(self, buffer: Tensor, stage: int, handle: dist.ProcessGroup | None, tag: int) -> PendingRecv:
        work = dist.irecv(buffer, self.group.ranks[stage], group=handle, tag=tag)
        assert work is not None, "a stage is part of its pipeline"
        return PendingRecv(work, buffer)

    def _isend(self, tensor: Tensor, stage: int, handle: dist.ProcessGroup | None, tag: int) -> None:
        work = dist.isend(tensor, self.group.ranks[stage], group=handle, tag=tag)
        assert work is not None, "a stage is part of its pipeline"
        self._sends.append((work, tensor))
        while len(self._sends) > SENDS_PER_STAGE * self.group.size:
            self._sends.popleft()[0].wait()


def prefetch_receives(post_recv: Callable[[int], PendingRecv], sizes: Iterable[int]) -> Iterator[Tensor]:
    """Yield received tensors with these numbers of rows, always with the next receive posted."""
    remaining = iter(sizes)
    # The first receive is posted at once, not when the first tensor is asked for.
    pending = deque(post_recv(rows) for rows in islice(remaining, 1))

    def receive() -> Iterator[Tensor]:
        while pending:
            pending.extend(post_recv(rows) for rows in islice(remaining, 1))
            yield pending.popleft().wait()

    return receive()
