"""Messages between pipeline stages."""

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

import torch
import torch.distributed as dist
from torch import Tensor

from realrl.algorithms.base.method import Metrics
from realrl.engine.pipeline.transport import OrderedTransport, TaggedTransport, Transport, needs_order
from realrl.engine.pipeline.transport import PendingRecv as PendingRecv
from realrl.model.parallel.group import Group

_FORWARD, _BACKWARD, _TOKENS = 1, 2, 3  # tags, where the backend knows them


class Pipeline:
    """Messages of this rank's stage.

    Sends do not wait. Receives are given in advance, so that a backend that wants them early has them before other
    computation; where they must be late, they are posted when they are waited for, in the order of waiting. Every
    stage must therefore wait for messages of a pair of stages in the order in which they are sent.
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
        of its own, for what flows against the stages, where the backend wants one."""
        self.group = group
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._device = device
        self._transport: Transport = (
            OrderedTransport(group) if needs_order(device) else TaggedTransport(group, reverse_group)
        )

    @property
    def first(self) -> bool:
        """True on the first stage of the pipeline."""
        return self.group.index == 0

    @property
    def last(self) -> bool:
        """True on the last stage of the pipeline."""
        return self.group.index == self.group.size - 1

    def post_recv(self, rows: int, *, followed: bool = False) -> PendingRecv:
        """Post the receive of activations of the stage before. [rows, H]

        `followed`: others follow before that stage receives tokens.
        """
        return self._transport.post_recv(
            lambda: self._empty_hidden(rows), self.group.index - 1, _FORWARD, followed=followed
        )

    def send(self, hidden: Tensor, *, followed: bool = False) -> None:
        """Send activations to the next stage. `followed`: others follow before this stage receives tokens."""
        activations = hidden.detach().contiguous()
        self._transport.send(activations, self.group.index + 1, _FORWARD, followed=followed)

    def post_recv_gradient(self, rows: int) -> PendingRecv:
        """Post the receive of the gradient of what is sent to the next stage. [rows, H]"""
        return self._transport.post_recv(lambda: self._empty_hidden(rows), self.group.index + 1, _BACKWARD)

    def send_gradient(self, gradient: Tensor) -> None:
        """Send the gradient of what came from the stage before."""
        self._transport.send_back(gradient.contiguous(), self.group.index - 1, _BACKWARD)

    def post_recv_tokens(self, count: int) -> PendingRecv:
        """Post the receive of the tokens that `broadcast_tokens` sends. [count] int64"""

        def make_buffer() -> Tensor:
            return torch.empty(count, dtype=torch.int64, device=self._device)

        index, last = self.group.index, self.group.size - 1
        ordered = self._transport
        if not isinstance(ordered, OrderedTransport):
            return ordered.post_recv(make_buffer, last, _TOKENS)
        pending = ordered.post_recv(make_buffer, last if self.first else index - 1, _TOKENS)

        def pass_on() -> Tensor:
            tokens = pending.wait()
            if index + 1 < last:
                ordered.send(tokens, index + 1, _TOKENS, followed=True)
            return tokens

        return PendingRecv(pass_on)

    def broadcast_tokens(self, tokens: Tensor) -> None:
        """Broadcast the sampled tokens from the last stage to all others. [B] int64

        In one order they go round: to the first stage, which passes them on with its hidden states, as do the
        others. Sent to each stage, they would occupy the last one until all others have come to their next step.
        """
        around = isinstance(self._transport, OrderedTransport) and not self.first
        for stage in range(1 if around else self.group.size - 1):
            self._transport.send_back(tokens, stage, _TOKENS)

    def broadcast_metrics(self, metrics: Metrics) -> Metrics:
        """Broadcast the last stage's metrics to every stage."""
        if self.group.size == 1:
            return metrics
        source, handle, device = self.group.ranks[-1], self.group.handle, self._device
        text = json.dumps(metrics.to_plain()).encode() if self.last else b""
        size = torch.tensor([len(text)], device=device)
        dist.broadcast(size, source, group=handle)
        message = torch.empty(int(size), dtype=torch.uint8, device=device)
        if self.last:
            message = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
        dist.broadcast(message, source, group=handle)
        return Metrics.from_plain(json.loads(message.cpu().numpy().tobytes()))

    def flush(self) -> None:
        """Hold back nothing that is to go with the next message: others wait for it, and there is none soon."""
        self._transport.flush()

    def wait_sends(self) -> None:
        """Wait until everything sent has left."""
        self._transport.finish()

    def _empty_hidden(self, rows: int) -> Tensor:
        return torch.empty(rows, self._hidden_size, dtype=self._dtype, device=self._device)


def prefetch_receives(post_recv: Callable[[int], PendingRecv], sizes: Iterable[int]) -> Iterator[Tensor]:
    """Yield received tensors with these numbers of rows, always with the next receive given in advance."""
    remaining = iter(sizes)
    # The first one at once, not when the first tensor is asked for.
    pending = deque(post_recv(rows) for rows in islice(remaining, 1))

    def receive() -> Iterator[Tensor]:
        while pending:
            pending.extend(post_recv(rows) for rows in islice(remaining, 1))
            yield pending.popleft().wait()

    return receive()
