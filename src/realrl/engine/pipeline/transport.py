"""Point-to-point messages between pipeline stages: by tags over gloo, in one order over NCCL.

Gloo holds a message back until its receive is posted, so receives are posted early. An NCCL receive is a kernel
that spins until its message comes: whatever waits for all kernels of the device (a module that is loaded lazily,
memory that the allocator gives back, a first connection) then waits for the message, too. So on NCCL nothing is
posted before it is needed, and stages never wait for each other in a circle, even if every operation made the host
wait for its end.
"""

from collections import deque
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from realrl.layout.limits import SENDS_PER_STAGE
from realrl.model.parallel.group import Group


class PendingRecv:
    """Receive from another stage: posted already, or as soon as its tensor is waited for."""

    def __init__(self, finish: Callable[[], Tensor]) -> None:
        self._finish = finish

    def wait(self) -> Tensor:
        """Wait for the tensor and return it; once."""
        return self._finish()


class Sends:
    """Sends under way, the oldest first; a few are left alone, so that sending does not wait."""

    def __init__(self, stages: int) -> None:
        self._most = SENDS_PER_STAGE * stages
        self._under_way: deque[tuple[list[dist.Work], list[Tensor]]] = deque()

    def add(self, works: list[dist.Work], tensors: list[Tensor]) -> None:
        """Keep tensors until they have left; wait for the oldest ones where there are too many."""
        self._under_way.append((works, tensors))
        while len(self._under_way) > self._most:
            self._wait_oldest()

    def wait(self) -> None:
        """Wait until everything has left."""
        while self._under_way:
            self._wait_oldest()

    def _wait_oldest(self) -> None:
        works, _ = self._under_way.popleft()
        for work in works:
            work.wait()


class TaggedTransport:
    """Messages over a backend that knows tags and holds a message back until its receive is posted: gloo.

    The two directions have connections of their own.
    """

    def __init__(self, group: Group, reverse_group: Group) -> None:
        self._group, self._reverse = group, reverse_group
        self._sends = Sends(group.size)

    def post_recv(
        self, make_buffer: Callable[[], Tensor], stage: int, tag: int, *, followed: bool = False
    ) -> PendingRecv:
        """Post a receive now, whatever it is followed by."""
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
        """Send now, without waiting, whatever it is followed by."""
        work = dist.isend(
            tensor, self._group.ranks[stage], group=self._handle(stage > self._group.index), tag=tag
        )
        assert work is not None, "a stage is part of its pipeline"
        self._sends.add([work], [tensor])

    def send_back(self, tensor: Tensor, stage: int, tag: int) -> None:
        """Send to an earlier stage now, without waiting."""
        self.send(tensor, stage, tag)

    def flush(self) -> None:
        """Hold nothing back, which is so anyway."""

    def finish(self) -> None:
        """Wait until everything sent has left."""
        self._sends.wait()

    def _handle(self, forward: bool) -> dist.ProcessGroup | None:
        return (self._group if forward else self._reverse).handle


class OrderedTransport:
    """Messages over a backend that delivers in the order of posting and whose operations occupy the device: NCCL.

    A receive is posted when its tensor is waited for. What goes back to an earlier stage is posted together with
    the next receive, as one group of operations, which progress independently: the earlier stage may be sending,
    and receive afterwards. Nothing computes in between, so nobody waits longer for it. All of it is in the stream
    of one communicator; tags mean nothing.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._sends = Sends(group.size)
        self._held: list[tuple[Tensor, int]] = []
        """What goes back with the next receive: (tensor, stage)."""
        self._along: list[tuple[Tensor, int]] = []
        """What goes on with the next send."""

    def post_recv(
        self, make_buffer: Callable[[], Tensor], stage: int, tag: int, *, followed: bool = False
    ) -> PendingRecv:
        """Prepare a receive, which is posted when it is waited for.

        `followed`: that stage sends another message before it receives, and what goes back is posted with that one.
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
        """Send to a later stage, without waiting: now, or where it is `followed`, with the next message to it."""
        self._along.append((tensor, stage))
        if not followed:
            self.flush()

    def send_back(self, tensor: Tensor, stage: int, tag: int) -> None:
        """Send to an earlier stage with the next receive, or at the end."""
        self._held.append((tensor, stage))

    def finish(self) -> None:
        """Send what is held back, and wait until everything has left."""
        self.flush()
        self._sends.wait()

    def flush(self) -> None:
        """Send what is held back, without waiting."""
        sent, self._held, self._along = [*self._held, *self._along], [], []
        if sent:
            works = self._post([self._operation(dist.isend, *one) for one in sent])
            self._sends.add(works, [tensor for tensor, _ in sent])

    def _operation(self, kind: Callable[..., object], tensor: Tensor, stage: int) -> dist.P2POp:
        return dist.P2POp(kind, tensor, self._group.ranks[stage], group=self._group.handle)

    @staticmethod
    def _post(operations: list[dist.P2POp]) -> list[dist.Work]:
        # Also one alone: outside a batch torch would make a communicator for the pair, or warn at every group.
        works: list[dist.Work] = dist.batch_isend_irecv(operations)
        return works


Transport = TaggedTransport | OrderedTransport


def needs_order(device: torch.device) -> bool:
    """Check whether messages of tensors on a device go through NCCL, in one order and just in time."""
    return device.type == "cuda"
