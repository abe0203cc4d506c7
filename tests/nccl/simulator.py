"""Simulator of the rules by which NCCL operations and hosts wait for each other; it finds deadlocks.

A rank is a host that goes through actions, and streams on its device. An operation starts when those before it in
its stream have ended and what it waits for has; a started message or collective occupies its stream until all that
take part have started it. Messages of a pair on one communicator match in the order of posting, collectives by
their number. Hosts wait where a message between hosts has not been sent, or for the device (`Sync`).
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Grain = Literal["group", "waves", "rounds"]
"""What of a group of messages progresses at a time: everything, as NCCL promises; the k-th message of each peer; or
of those the messages with peers at one distance, as its kernels go through large groups."""


@dataclass(frozen=True)
class Collective:
    """Operation of all members of a communicator."""

    comm: str
    members: tuple[int, ...]
    name: str = "all_reduce"


@dataclass(frozen=True)
class Messages:
    """Group of messages on a communicator: (peer, size) each, in the order of posting."""

    comm: str
    sends: tuple[tuple[int, int], ...] = ()
    receives: tuple[tuple[int, int], ...] = ()

    @property
    def members(self) -> list[int]:
        """Ranks of the communicator, after which it is called `RANK-RANK-...`."""
        return [int(rank) for rank in self.comm.split("-")]

    def divide(self, grain: Grain, rank: int) -> "list[Messages]":
        """Divide the group into what progresses at a time.

        A round has the messages to the rank at a distance, and from the one at that distance on the other side.
        """
        if grain == "group":
            return [self]
        place, ranks = self.members.index(rank), len(self.members)
        parts: defaultdict[tuple[int, int], tuple[list[tuple[int, int]], list[tuple[int, int]]]]
        parts = defaultdict(lambda: ([], []))
        for direction, messages in enumerate((self.sends, self.receives)):
            counts: defaultdict[int, int] = defaultdict(int)
            for peer, size in messages:
                there = self.members.index(peer)
                distance = (there - place if direction == 0 else place - there) % ranks
                key = counts[peer], distance if grain == "rounds" else 0
                parts[key][direction].append((peer, size))
                counts[peer] += 1
        return [Messages(self.comm, tuple(s), tuple(r)) for _, (s, r) in sorted(parts.items())]


@dataclass(frozen=True)
class Launch:
    """Put an operation into a stream, after other launches of the rank (by number) have ended. None: computing."""

    stream: str
    operation: Collective | Messages | None
    after: tuple[int, ...] = ()


@dataclass(frozen=True)
class Sync:
    """Have the host wait for all streams of its device, as `cudaFree` does, and a module that is loaded lazily."""


@dataclass(frozen=True)
class HostSend:
    """Send from host to host, without waiting."""

    peer: int
    tag: str


@dataclass(frozen=True)
class HostReceive:
    """Wait for the next message with a tag from another host."""

    peer: int
    tag: str


Action = Launch | Sync | HostSend | HostReceive
COMPUTE = "compute"


class DeadlockError(Exception):
    """Ranks wait for each other, or for what never comes."""


class MismatchError(Exception):
    """Ranks do different things on one communicator."""


@dataclass
class _Operation:
    number: int
    part: Collective | Messages | None
    after: tuple[int, ...]
    last: bool
    """Whether it is the last part of its launch."""
    places: list[tuple[tuple[str, int, int], int, bool]] | None = None
    """Of started messages: (communicator, sender, receiver), number, whether it is sent."""
    instance: int = 0


@dataclass
class _Rank:
    actions: Sequence[Action]
    position: int = 0
    launched: int = 0
    ended: set[int] = field(default_factory=set)
    streams: dict[str, list[_Operation]] = field(default_factory=lambda: defaultdict(list))
    collectives: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    @property
    def busy(self) -> bool:
        return any(self.streams.values())


class Simulator:
    """One run of programs: rank -> actions."""

    def __init__(
        self, programs: Mapping[int, Sequence[Action]], *, synchronous: bool, grain: Grain = "group"
    ) -> None:
        """`synchronous`: every launch makes the host wait for the device, the worst that can happen to it."""
        self._ranks = {rank: _Rank(actions) for rank, actions in programs.items()}
        self._synchronous, self._grain = synchronous, grain
        self._posted: defaultdict[tuple[str, int, int], tuple[list[int], list[int]]]
        self._posted = defaultdict(lambda: ([], []))
        self._arrived: defaultdict[tuple[str, int], dict[int, Collective]] = defaultdict(dict)
        self._mail: defaultdict[tuple[int, int, str], int] = defaultdict(int)

    def run(self) -> None:
        """Run to the end; DeadlockError or MismatchError."""
        waiting = set(self._ranks)
        while waiting:
            moved = False
            for rank in sorted(waiting):
                moved |= self._advance(rank)
            waiting = {r for r in waiting if self._ranks[r].busy or self._left(r)}
            if not moved and waiting:
                raise DeadlockError("\n".join(self._describe(rank) for rank in sorted(waiting)))

    def _left(self, rank: int) -> bool:
        state = self._ranks[rank]
        return state.position < len(state.actions)

    def _advance(self, rank: int) -> bool:
        """Let host and streams of a rank go on as far as they can; whether anything has moved."""
        moved, went_on = False, True
        while went_on:
            went_on = self._advance_streams(rank) or self._advance_host(rank)
            moved |= went_on
        return moved

    def _advance_host(self, rank: int) -> bool:
        state = self._ranks[rank]
        if not self._left(rank) or (self._synchronous and state.busy):
            return False
        action = state.actions[state.position]
        match action:
            case Launch(stream, operation, after):
                parts: Sequence[Collective | Messages | None] = [operation]
                if isinstance(operation, Messages):
                    parts = operation.divide(self._grain, rank)
                for i, part in enumerate(parts):
                    state.streams[stream].append(
                        _Operation(state.launched, part, after, last=i == len(parts) - 1)
                    )
                state.launched += 1
            case Sync():
                if state.busy:
                    return False
            case HostSend(peer, tag):
                self._mail[rank, peer, tag] += 1
            case HostReceive(peer, tag):
                if not self._mail[peer, rank, tag]:
                    return False
                self._mail[peer, rank, tag] -= 1
        state.position += 1
        return True

    def _advance_streams(self, rank: int) -> bool:
        state, moved = self._ranks[rank], False
        for stream in list(state.streams):
            queue = state.streams[stream]
            while queue and self._end(rank, queue[0]):
                if queue[0].last:
                    state.ended.add(queue[0].number)
                queue.pop(0)
                moved = True
        return moved

    def _end(self, rank: int, operation: _Operation) -> bool:
        """Start an operation, if it can be, and say whether it has ended."""
        if not set(operation.after) <= self._ranks[rank].ended:
            return False
        match operation.part:
            case None:
                return True
            case Collective() as collective:
                return self._end_collective(rank, operation, collective)
            case Messages() as messages:
                if operation.places is None:
                    operation.places = list(self._post(rank, messages))
                return all(self._matched(*place) for place in operation.places)

    def _end_collective(self, rank: int, operation: _Operation, collective: Collective) -> bool:
        if not operation.instance:
            numbers = self._ranks[rank].collectives
            numbers[collective.comm] += 1
            operation.instance = numbers[collective.comm]
            self._arrived[collective.comm, operation.instance][rank] = collective
        arrived = self._arrived[collective.comm, operation.instance]
        if len(set(arrived.values())) > 1:
            raise MismatchError(f"{collective.comm}: {arrived}")
        return set(arrived) == set(collective.members)

    def _post(self, rank: int, messages: Messages) -> Iterator[tuple[tuple[str, int, int], int, bool]]:
        for peer, size in messages.sends:
            pair = messages.comm, rank, peer
            self._posted[pair][0].append(size)
            yield pair, len(self._posted[pair][0]) - 1, True
        for peer, size in messages.receives:
            pair = messages.comm, peer, rank
            self._posted[pair][1].append(size)
            yield pair, len(self._posted[pair][1]) - 1, False

    def _matched(self, pair: tuple[str, int, int], number: int, sent: bool) -> bool:
        mine, other = self._posted[pair] if sent else self._posted[pair][::-1]
        if len(other) <= number:
            return False
        if mine[number] != other[number]:
            raise MismatchError(f"message {number} of {pair}: {mine[number]} and {other[number]} bytes")
        return True

    def _describe(self, rank: int) -> str:
        state = self._ranks[rank]
        heads = {name: queue[0].part for name, queue in state.streams.items() if queue}
        host = state.actions[state.position] if self._left(rank) else "end"
        return f"rank {rank}: host at {state.position}: {host}; streams {heads}"


def check(
    programs: Mapping[int, Sequence[Action]], grains: Sequence[Grain] = ("group", "waves", "rounds")
) -> None:
    """Check that programs end, whatever the host waits for and however groups of messages are divided.

    If they end where every launch makes the host wait, they end where fewer do: all constraints that can arise on a
    device (streams, queues that several streams share, a lack of room for kernels) are among those of the order of
    launches. The other runs check the simulator.
    """
    for grain in grains:
        Simulator(programs, synchronous=True, grain=grain).run()
        Simulator(programs, synchronous=False, grain=grain).run()
