"""Discrete-event simulator of per-rank programs."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from realrl.planner.simulate.estimate import Slice
from realrl.program.instructions import (
    Instruction,
    Program,
    Reallocate,
    Receive,
    Report,
    Run,
    Send,
    ShareLengths,
)
from realrl.program.lower import WRITER
from realrl.program.text import format_instruction

STEPS = 5
"""Number of simulated steps; only in the first do all ranks start together."""
_SETTLED = 2
"""First step that is taken to be in steady state."""


class SimulationError(Exception):
    """Error: programs would deadlock, which is a bug of this project."""


@dataclass(frozen=True)
class Simulation:
    """Timeline of several steps; times are in seconds after the start of the first."""

    events: Mapping[int, Sequence[Slice]]
    """Executed instructions in order, by one rank of each group of ranks with equal programs."""
    groups: tuple[int, ...]
    """Representative in `events`, by rank."""
    ends: tuple[float, ...]
    """End of each step, when its last rank has finished."""

    @property
    def step_seconds(self) -> float:
        """Seconds of one isolated step, from its start until the last rank has finished it."""
        return self.ends[0]

    @property
    def repeated_seconds(self) -> float:
        """Steady-state seconds per step."""
        return (self.ends[-1] - self.ends[_SETTLED - 1]) / (len(self.ends) - _SETTLED)

    def slices(self, step: int) -> tuple[tuple[Slice, ...], ...]:
        """Return the timeline of one step by rank; times count from the start of the first step."""
        chosen = {rank: [s for s in events if s.step == step] for rank, events in self.events.items()}
        return tuple(
            tuple(replace(s, rank=rank) for s in chosen[group]) for rank, group in enumerate(self.groups)
        )


def simulate(
    programs: Sequence[Program],
    seconds: Callable[[Instruction], float],
    steps: int = STEPS,
    *,
    reporting: float = 0.0,
) -> Simulation:
    """Simulate several steps of programs that `validate` accepts.

    `seconds`: duration of an instruction once all participants and inputs have arrived; `reporting`: seconds that
    the rank which writes has to do between two steps, while others begin the next one. The simulator blocks where
    workers block: ranks of a call start together, as do those of a reallocation that sends anything. Sends, and the
    sender's side of a report, do not block, but a rank starts its next step only when all its messages have been
    received, because gloo does not buffer for a receiver that has not posted. Nothing else synchronises ranks.
    Functions run beside the instructions that follow, on each rank by itself and one after the other, until their
    outputs or metrics are sent or the step ends. SimulationError for a deadlock.
    """
    return _Simulator(programs, seconds, steps, reporting).run()


@dataclass
class _Group:
    """Ranks with equal programs, which execute in lockstep."""

    ranks: tuple[int, ...]
    program: tuple[int, ...]
    """Indices of instructions."""
    clock: float = 0.0
    step: int = 0
    position: int = 0
    events: list[Slice] = field(default_factory=list)
    functions: dict[str, float] = field(default_factory=dict)
    """Functions of this step -> when they end."""

    @property
    def host_free(self) -> float:
        """When the last function of this step ends."""
        return max(self.functions.values(), default=0.0)

    @cached_property
    def members(self) -> frozenset[int]:
        """Set of the ranks."""
        return frozenset(self.ranks)


class _Simulator:
    def __init__(
        self,
        programs: Sequence[Program],
        seconds: Callable[[Instruction], float],
        steps: int,
        reporting: float,
    ) -> None:
        self.steps = steps
        self.reporting = reporting
        self.instructions, numbered = _numbered(programs)
        self.seconds = [seconds(instruction) for instruction in self.instructions]
        alike: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
        for rank, program in enumerate(numbered):
            alike[program].append(rank)
        self.groups = [_Group(tuple(ranks), program) for program, ranks in alike.items()]
        self.members: list[list[_Group]] = [[] for _ in self.instructions]
        for group in self.groups:
            for number in dict.fromkeys(group.program):
                self.members[number].append(group)
        self.sides: dict[object, list[int]] = defaultdict(list)
        """Indices of the instructions that send or receive a message, by message."""
        for number, instruction in enumerate(self.instructions):
            if isinstance(instruction, Send | Receive):
                self.sides[instruction.number, type(instruction)].append(number)
        self.came: dict[tuple[int, int], dict[int, float]] = defaultdict(dict)
        """Arrival times by (step, instruction) and first rank of a group."""
        self.done: dict[tuple[int, int], dict[int, float]] = defaultdict(dict)
        """Completion times by (step, instruction) and first rank of a group."""

    def run(self) -> Simulation:
        ends = [0.0] * self.steps
        while any(group.step < self.steps for group in self.groups):
            progress = False
            for group in self.groups:
                while group.step < self.steps and self._advance(group, ends):
                    progress = True
            if not progress:
                raise SimulationError(f"no rank can go on: {', '.join(self._waiting())}")
        first_of = {rank: group.ranks[0] for group in self.groups for rank in group.ranks}
        return Simulation(
            {group.ranks[0]: group.events for group in self.groups},
            tuple(first_of[rank] for rank in range(len(first_of))),
            tuple(ends),
        )

    def _waiting(self) -> Iterator[str]:
        for group in (group for group in self.groups if group.step < self.steps):
            if group.position < len(group.program):
                instruction = self.instructions[group.program[group.position]]
                yield f"rank {group.ranks[0]} at {format_instruction(instruction)}"
            else:
                yield f"rank {group.ranks[0]}, of which something is not taken"

    def _advance(self, group: _Group, ends: list[float]) -> bool:
        """Execute the group's next instruction or start its next step; False if it still has to wait."""
        if group.position == len(group.program):
            received = self._all_received(group)
            if received is None:
                return False
            group.clock = max(group.clock, group.host_free)
            ends[group.step] = max(ends[group.step], group.clock)
            group.clock = max(group.clock, received) + (self.reporting if WRITER in group.members else 0.0)
            group.step += 1
            group.position = 0
            group.functions = {}
            return True
        number = group.program[group.position]
        if (function := self._function(number)) is not None:
            self._call(group, number, function)
            return True
        ready = max(group.clock, self._collected(group, number))
        self.came[group.step, number].setdefault(group.ranks[0], ready)
        start = self._start(group, number, ready)
        if start is None:
            return False
        arrived = group.clock
        group.clock = max(group.clock, start) + self.seconds[number]
        self.done[group.step, number][group.ranks[0]] = group.clock
        waiting = max(0.0, start - arrived)
        event = Slice(
            rank=group.ranks[0],
            step=group.step,
            start=arrived,
            seconds=group.clock - arrived,
            waiting=waiting,
            instruction=self.instructions[number],
        )
        group.events.append(event)
        group.position += 1
        return True

    def _function(self, number: int) -> str | None:
        """Name of the function that an instruction calls; None if it calls none."""
        match self.instructions[number]:
            case Run(call, None, _):
                return call
        return None

    def _call(self, group: _Group, number: int, function: str) -> None:
        """Run a function on the group's hosts while the group continues."""
        start = max(group.clock, group.host_free)
        seconds = self.seconds[number]
        group.functions[function] = start + seconds
        instruction = self.instructions[number]
        event = Slice(
            rank=group.ranks[0],
            step=group.step,
            start=start,
            seconds=seconds,
            waiting=0.0,
            instruction=instruction,
            host=True,
        )
        group.events.append(event)
        group.position += 1

    def _collected(self, group: _Group, number: int) -> float:
        """End of the function whose outputs or metrics the instruction sends; 0 if it sends none."""
        match self.instructions[number]:
            case Send(producer=function) | ShareLengths(call=function):
                return group.functions.get(function, 0.0)
            case Report(function, senders, _) if not group.members.isdisjoint(senders):
                return group.functions.get(function, 0.0)
        return 0.0

    def _start(self, group: _Group, number: int, ready: float) -> float | None:
        """Time at which all dependencies of the instruction are met, for a group that is `ready`; None if not known
        yet."""
        instruction = self.instructions[number]
        match instruction:
            case Reallocate() if self.seconds[number] == 0:
                return ready  # nothing is sent, so ranks do not synchronise
            case Run() | Reallocate():
                return self._last(self.came, group.step, [number])
            case ShareLengths(_, _, heads, _):
                return self._last(self.came, group.step, [number], heads)
            case Receive():
                return self._last(self.done, group.step, self.sides[instruction.number, Send])
            case Report(_, senders, receiver) if receiver in group.members:
                return self._last(self.came, group.step, [number], senders)
            case _:
                return ready

    def _all_received(self, group: _Group) -> float | None:
        """Time at which all messages of the group's step have been received; None if not known yet."""
        latest = 0.0
        for number in group.program:
            instruction = self.instructions[number]
            match instruction:
                case Send():
                    takers = self.sides[instruction.number, Receive]
                    taken = self._last(self.done, group.step, takers)
                case ShareLengths(_, _, heads, _) if heads[0] in group.members:
                    taken = self._last(self.came, group.step, [number])
                case Report(_, senders, receiver) if not group.members.isdisjoint(senders):
                    taken = self._last(self.done, group.step, [number], (receiver,))
                case _:
                    continue
            if taken is None:
                return None
            latest = max(latest, taken)
        return latest

    def _last(
        self,
        log: Mapping[tuple[int, int], Mapping[int, float]],
        step: int,
        numbers: Sequence[int],
        ranks: tuple[int, ...] | None = None,
    ) -> float | None:
        """Latest entry of the groups that execute these instructions; None if one has no entry yet.

        With `ranks`, only groups that contain one of them count.
        """
        latest = 0.0
        for number in numbers:
            entries = log[step, number]
            for group in self.members[number]:
                if ranks is not None and group.members.isdisjoint(ranks):
                    continue
                if group.ranks[0] not in entries:
                    return None
                latest = max(latest, entries[group.ranks[0]])
        return latest


def _numbered(programs: Sequence[Program]) -> tuple[list[Instruction], list[tuple[int, ...]]]:
    """Distinct instructions, and each program as indices of them.

    Repetitions of an instruction in one program have different indices.
    """
    instructions: list[Instruction] = []
    values: dict[Instruction, int] = {}
    by_identity: dict[int, int] = {}
    by_occurrence: dict[tuple[int, int], int] = {}
    numbered = []
    for program in programs:
        times: Counter[int] = Counter()
        own = []
        for instruction in program.instructions:
            # Ranks mostly share the same objects, and hashing them is slow: look up by identity first.
            if id(instruction) not in by_identity:
                by_identity[id(instruction)] = values.setdefault(instruction, len(values))
            value = by_identity[id(instruction)]
            key = (value, times[value])
            times[value] += 1
            if key not in by_occurrence:
                by_occurrence[key] = len(instructions)
                instructions.append(instruction)
            own.append(by_occurrence[key])
        numbered.append(tuple(own))
    return instructions, numbered
