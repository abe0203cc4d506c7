"""Messages between pipeline stages."""

import json
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from realrl.algorithms.method import Metrics
from realrl.layout.limits import SENDS_PER_STAGE
from realrl.model.group import Group


@dataclass(frozen=True)
class Action:
    """Forward (`F`) or backward (`B`) of one micro-batch on one stage.

    Its text is for example `2F0`: stage 2, forward, micro-batch 0.
    """

    stage: int
    kind: Literal["F", "B"]
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"

    @classmethod
    def parse(cls, text: str) -> "Action":
        """Read the text form; ValueError for anything else."""
        match = re.fullmatch(r"(\d+)([FB])(\d+)", text)
        if match is None:
            raise ValueError(f"not a pipeline action: {text!r}")
        return cls(int(match[1]), "F" if match[2] == "F" else "B", int(match[3]))

    def list_dependencies(self, stages: int) -> tuple["Action", ...]:
        """Actions that must have ended before this one starts."""
        if self.kind == "F":
            return (Action(self.stage - 1, "F", self.micro_batch),) if self.stage else ()
        own = Action(self.stage, "F", self.micro_batch)
        if self.stage == stages - 1:
            return (own,)
        return (own, Action(self.stage + 1, "B", self.micro_batch))


Schedule = list[list[Action]]
"""Actions of each stage, in order."""


def make_1f1b_schedule(stages: int, micro_batches: int) -> Schedule:
    """Make a 1F1B schedule (PipeDream-Flush, arXiv 2006.09503).

    After a warm-up, each stage alternates, so that stage s never holds activations of more than `stages - s`
    micro-batches.
    """
    schedule: Schedule = []
    for stage in range(stages):
        warmup = min(stages - stage - 1, micro_batches)
        order = [Action(stage, "F", i) for i in range(warmup)]
        for i in range(micro_batches - warmup):
            order += [Action(stage, "F", warmup + i), Action(stage, "B", i)]
        order += [Action(stage, "B", i) for i in range(micro_batches - warmup, micro_batches)]
        schedule.append(order)
    return schedule


def dry_run(schedule: Schedule) -> int:
    """Execute a schedule in unit time steps without any process; the number of steps it takes. Tests prove with it
    that schedules end.

    ValueError, with the grid of what each stage has done and where it stands, when an action runs twice or
    waits for one that never comes.
    """
    done: set[Action] = set()
    position = [0] * len(schedule)
    steps = 0
    while any(p < len(actions) for p, actions in zip(position, schedule, strict=True)):
        ready = [
            stage
            for stage, actions in enumerate(schedule)
            if position[stage] < len(actions)
            and set(actions[position[stage]].list_dependencies(len(schedule))) <= done
        ]
        started = [schedule[stage][position[stage]] for stage in ready]
        if not ready or done & set(started):
            raise ValueError("the schedule cannot go on:\n" + _grid(schedule, position))
        done |= set(started)
        for stage in ready:
            position[stage] += 1
        steps += 1
    return steps


def _grid(schedule: Schedule, position: Sequence[int]) -> str:
    lines = []
    for stage, actions in enumerate(schedule):
        past = " ".join(map(str, actions[: position[stage]]))
        rest = actions[position[stage] :]
        here = f" {rest[0]} <-- ERROR HERE" if rest else " (end)"
        lines.append(f"  stage {stage}: {past}{here}")
    return "\n".join(lines)


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
