"""Messages between pipeline stages. Gloo matches messages by tag, NCCL by order.

Gloo holds a message back until its receive is posted, so receives are posted early. An NCCL receive is a kernel
that spins until its message arrives. Some work waits for all kernels of the device: lazy loading of a module,
memory that the allocator returns, a first connection. Such work would then wait for the message, too. So with NCCL
nothing is posted before it is needed. Messages are ordered so that stages never wait for each other in a circle.
This would hold even if the host waited for the end of every operation.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from realrl.layout.limits import SENDS_PER_STAGE
from realrl.model.group import Group


class PendingRecv:
    """Receive from another stage: posted already, or posted when `wait` is called."""

    def __init__(self, finish: Callable[[], Tensor]) -> None:
        self._finish = finish

    def wait(self) -> Tensor:
        """Wait for the tensor and return it; call it once."""
        return self._finish()


class Sends:
    """Sends in progress, oldest first. A limited number may be pending, so that a new send usually does not
    wait."""

    def __init__(self, stages: int) -> None:
        self._most = SENDS_PER_STAGE * stages
        self._under_way: deque[tuple[list[dist.Work], list[Tensor]]] = deque()

    def add(self, works: list[dist.Work], tensors: list[Tensor]) -> None:
        """Keep tensors alive until they are sent; wait for the oldest if there are too many."""
        self._under_way.append((works, tensors))
        while len(self._under_way) > self._most:
            self._wait_oldest()

    def wait(self) -> None:
        while self._under_way:
            self._wait_oldest()

    def _wait_oldest(self) -> None:
        works, _ = self._under_way.popleft()
        for work in works:
            work.wait()


class TaggedTransport:
    """Messages over gloo, which matches tags and holds a message back until its receive is posted.

    Each direction has its own connection.
    """

    def __init__(self, group: Group, reverse_group: Group) -> None:
        self._group, self._reverse = group, reverse_group
        self._sends = Sends(group.size)

    def post_recv(
        self, make_buffer: Callable[[], Tensor], stage: int, tag: int, *, followed: bool = False
    ) -> PendingRecv:
        buffer = make_buffer()
        work = dist.irecv(
            buffer, self._group.ranks[stage], group=self._handle(stage < self._group.index), tag=tag
        )
        assert work is not None, "a stage is part of its pipeline"

        def finish() -> Tensor:
            work.wait()
            return buffer

        return PendingRecv(finish)

    def send(self, tensor: Tensor, stage: int, tag: int, *, followed: bool = False) -> None:
        work = dist.isend(
            tensor, self._group.ranks[stage], group=self._handle(stage > self._group.index), tag=tag
        )
        assert work is not None, "a stage is part of its pipeline"
        self._sends.add([work], [tensor])

    def send_back(self, tensor: Tensor, stage: int, tag: int) -> None:
        self.send(tensor, stage, tag)

    def flush(self) -> None:
        """Do nothing, because gloo's messages are never held back."""

    def finish(self) -> None:
        self._sends.wait()

    def post(
        self, kind: Callable[..., Any], tensor: Tensor, stage: int, *, backward: bool
    ) -> list[dist.Work]:
        """Post an operation, `dist.isend` or `dist.irecv`. `backward`: whether the message is a gradient."""
        tag = _BACKWARD if backward else _FORWARD
        work = kind(tensor, self._group.ranks[stage], group=self._handle(not backward), tag=tag)
        assert work is not None, "a stage is part of its pipeline"
        return [work]

    def _handle(self, forward: bool) -> dist.ProcessGroup | None:
        return (self._group if forward else self._reverse).handle


class OrderedTransport:
    """Messages over NCCL, which delivers in the order of posting and whose operations occupy the device.

    A receive is posted when its tensor is waited for. Messages to an earlier stage are posted together with the
    next receive, as one group. Operations of a group progress independently, so the earlier stage may send before
    it receives. This delays no message, because the stage computes nothing before its next receive. All messages
    use the stream of one communicator, and tags are ignored.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._sends = Sends(group.size)
        self._held: list[tuple[Tensor, int]] = []
        """Messages to earlier stages that are sent with the next receive: (tensor, stage)."""
        self._along: list[tuple[Tensor, int]] = []
        """Messages to later stages that are sent with the next send."""

    def post_recv(
        self, make_buffer: Callable[[], Tensor], stage: int, tag: int, *, followed: bool = False
    ) -> PendingRecv:
        """Prepare a receive; it is posted when it is waited for.

        With `followed`, the other stage sends another message before it receives. So messages that are held back
        wait for a later receive.
        """

        def finish() -> Tensor:
            held: list[tuple[Tensor, int]] = []
            if not followed:
                held, self._held = self._held, held
            buffer = make_buffer()
            sends = [self._operation(dist.isend, *sent) for sent in held]
            for work in self._post([*sends, self._operation(dist.irecv, buffer, stage)]):
                work.wait()
            return buffer

        return PendingRecv(finish)

    def send(self, tensor: Tensor, stage: int, tag: int, *, followed: bool = False) -> None:
        """Send to a later stage without waiting: now or, if `followed`, with the next message to it."""
        self._along.append((tensor, stage))
        if not followed:
            self.flush()

    def send_back(self, tensor: Tensor, stage: int, tag: int) -> None:
        """Send to an earlier stage with the next receive, or at the end."""
        self._held.append((tensor, stage))

    def finish(self) -> None:
        """Send everything held back, and wait until everything is sent."""
        self.flush()
        self._sends.wait()

    def flush(self) -> None:
        """Send everything held back, without waiting."""
        sent, self._held, self._along = [*self._held, *self._along], [], []
        if sent:
            works = self._post([self._operation(dist.isend, *one) for one in sent])
            self._sends.add(works, [tensor for tensor, _ in sent])

    def post(
        self, kind: Callable[..., Any], tensor: Tensor, stage: int, *, backward: bool
    ) -> list[dist.Work]:
        """Post an operation, `dist.isend` or `dist.irecv`, by itself."""
        return self._post([self._operation(kind, tensor, stage)])

    def _operation(self, kind: Callable[..., Any], tensor: Tensor, stage: int) -> dist.P2POp:
        return dist.P2POp(kind, tensor, self._group.ranks[stage], group=self._group.handle)

    @staticmethod
    def _post(operations: list[dist.P2POp]) -> list[dist.Work]:
        # Even a single operation is batched: otherwise torch would make a communicator for the pair, or warn about
        # every group.
        works: list[dist.Work] = dist.batch_isend_irecv(operations)
        return works


Transport = TaggedTransport | OrderedTransport


def needs_order(device: torch.device) -> bool:
    """Check whether messages from a device go through NCCL. If so, all messages need one order, and are posted only
    when they are needed."""
    return device.type == "cuda"


_FORWARD, _BACKWARD, _TOKENS = 1, 2, 3  # tags of messages; NCCL ignores them


class Pipeline:
    """Messages between this rank's stage and the other stages.

    Sends do not wait. Receives are requested in advance, so that gloo can post them early. With NCCL, each receive
    is posted when it is waited for. Every stage must therefore wait for the messages of another stage in the order
    in which they are sent.
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
        """`group` has the ranks of the stages, first to last. `reverse_group` has the same ranks over a second
        connection, for messages to earlier stages; only gloo uses it."""
        self.group = group
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._device = device
        self._transport: Transport = (
            OrderedTransport(group) if needs_order(device) else TaggedTransport(group, reverse_group)
        )

    @property
    def first(self) -> bool:
        return self.group.index == 0

    @property
    def last(self) -> bool:
        return self.group.index == self.group.size - 1

    def post_recv(self, rows: int, *, followed: bool = False) -> PendingRecv:
        """Request the previous stage's activations. [rows, H]

        With `followed`, that stage sends another message before it receives tokens.
        """
        return self._transport.post_recv(
            lambda: self.make_hidden(rows), self.group.index - 1, _FORWARD, followed=followed
        )

    def send(self, hidden: Tensor, *, followed: bool = False) -> None:
        """Send activations to the next stage; if `followed`, another message is sent before this stage receives
        tokens."""
        activations = hidden.detach().contiguous()
        self._transport.send(activations, self.group.index + 1, _FORWARD, followed=followed)

    def post_recv_gradient(self, rows: int) -> PendingRecv:
        """Request the gradient of the activations sent to the next stage. [rows, H]"""
        return self._transport.post_recv(lambda: self.make_hidden(rows), self.group.index + 1, _BACKWARD)

    def send_gradient(self, gradient: Tensor) -> None:
        """Send the gradient of the previous stage's activations."""
        self._transport.send_back(gradient.contiguous(), self.group.index - 1, _BACKWARD)

    def post_recv_tokens(self, count: int) -> PendingRecv:
        """Request the tokens that `broadcast_tokens` sends. [count] int64"""

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
        """Send the sampled tokens from the last stage to all others. [B] int64

        With NCCL, the last stage sends the tokens only to the first stage. Each stage passes them on to the next,
        together with its hidden states. Direct messages to all stages would occupy the last stage until every other
        stage reaches its next step.
        """
        around = isinstance(self._transport, OrderedTransport) and not self.first
        for stage in range(1 if around else self.group.size - 1):
            self._transport.send_back(tokens, stage, _TOKENS)

    @property
    def receives_early(self) -> bool:
        """Whether receives are posted before they are needed, as gloo does."""
        return isinstance(self._transport, TaggedTransport)

    def post(
        self, kind: Callable[..., Any], tensor: Tensor, stage: int, *, backward: bool
    ) -> list[dist.Work]:
        """Post a send (`dist.isend`) of hidden states to any stage, or a receive (`dist.irecv`) from it, now.
        `backward`: whether the message has their gradient. Both stages must post all such messages between them in
        the same order."""
        return self._transport.post(kind, tensor, stage, backward=backward)

    def flush(self) -> None:
        """Send the messages that are held back. Other stages need them now, and the next message of this stage may
        come much later."""
        self._transport.flush()

    def wait_sends(self) -> None:
        self._transport.finish()

    def make_hidden(self, rows: int) -> Tensor:
        """Allocate a buffer for hidden states or their gradient. [rows, H]"""
        return torch.empty(rows, self._hidden_size, dtype=self._dtype, device=self._device)


def prefetch_receives(post_recv: Callable[[int], PendingRecv], sizes: Iterable[int]) -> Iterator[Tensor]:
    """Yield received tensors, whose numbers of rows are `sizes`. The next receive is always requested in
    advance."""
    remaining = iter(sizes)
    # The first receive is requested now, not when the first tensor is asked for.
    pending = deque(post_recv(rows) for rows in islice(remaining, 1))

    def receive() -> Iterator[Tensor]:
        while pending:
            pending.extend(post_recv(rows) for rows in islice(remaining, 1))
            yield pending.popleft().wait()

    return receive()
