"""When what happens on which rank: the other interpreter of programs, which keeps time instead of working."""

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
from realrl.program.text import format_instruction

STEPS = 5
"""Steps that are simulated; the first of them begins with all ranks at once, as it does not later."""
_SETTLED = 2
"""From this step on they are taken to be alike."""


class SimulationError(Exception):
    """Programs that would hang: a fault of ours."""


@dataclass(frozen=True)
class Simulation:
    """What happens when, over some steps; times in seconds after the start of the first."""

    events: Mapping[int, Sequence[Slice]]
    """One rank of each group of ranks with the same program -> its instructions, in order."""
    groups: tuple[int, ...]
    """By rank, the rank in `events` that does the same at the same time."""
    ends: tuple[float, ...]
    """By step, when the last rank has ended it."""

    @property
    def step_seconds(self) -> float:
        """One step alone, from its start until the last rank has ended it."""
        return self.ends[0]

    @property
    def repeated_seconds(self) -> float:
        """A step among many."""
        return (self.ends[-1] - self.ends[_SETTLED - 1]) / (len(self.ends) - _SETTLED)

    def slices(self, step: int) -> tuple[tuple[Slice, ...], ...]:
        """The instructions of one step, by rank, with times after the start of the first."""
        chosen = {rank: [s for s in events if s.step == step] for rank, events in self.events.items()}
        return tuple(
            tuple(replace(s, rank=rank) for s in chosen[group]) for rank, group in enumerate(self.groups)
        )


def simulate(
    programs: Sequence[Program], seconds: Callable[[Instruction], float], steps: int = STEPS
) -> Simulation:
    """Execute some steps of programs that `validate` accepts.

    `seconds`: what an instruction takes once everybody is there and everything has come. Blocks what blocks a
    worker: calls start together, and reallocations that send anything; sends and the sender's part of a report
    do not wait, but a rank begins its next step only when everything it has sent has been taken (gloo keeps
    nothing for a receiver that is not there); no other thing keeps ranks in the same step. Functions run beside the
    instructions that follow, each rank by itself and one after the other, until their outputs or metrics are sent
    or their lengths told, or the step ends. SimulationError for a deadlock.
    """
    return _Simulator(programs, seconds, steps).run()


@dataclass
class _Group:
    """Ranks with the same program, which therefore do everything at the same time."""

    ranks: tuple[int, ...]
    program: tuple[int, ...]
    """Numbers of instructions."""
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
        """The ranks."""
        return frozenset(self.ranks)


class _Simulator:
    def __init__(
        self, programs: Sequence[Program], seconds: Callable[[Instruction], float], steps: int
    ) -> None:
        self.steps = steps
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
        """Message -> numbers of the instructions that send or take it."""
        for number, instruction in enumerate(self.instructions):
            if isinstance(instruction, Send | Receive):
                self.sides[instruction.number, type(instruction)].append(number)
        self.came: dict[tuple[int, int], dict[int, float]] = defaultdict(dict)
        """(step, instruction) -> first rank of a group -> when it came there"""
        self.done: dict[tuple[int, int], dict[int, float]] = defaultdict(dict)
        """The same, when it had done it."""

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
        """Execute the group's next instruction, or go on to its next step; whether that is possible yet."""
        if group.position == len(group.program):
            left = self._everything_left(group)
            if left is None:
                return False
            group.clock = max(group.clock, group.host_free)
            ends[group.step] = max(ends[group.step], group.clock)
            group.clock = max(group.clock, left)
            group.step, group.position, group.functions = group.step + 1, 0, {}
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
        arrived, group.clock = group.clock, max(group.clock, start) + self.seconds[number]
        self.done[group.step, number][group.ranks[0]] = group.clock
        waiting = max(0.0, start - arrived)
        event = Slice(
            group.ranks[0],
            group.step,
            arrived,
            group.clock - arrived,
            waiting,
            self.instructions[number],
        )
        group.events.append(event)
        group.position += 1
        return True

    def _function(self, number: int) -> str | None:
        """The function that an instruction calls, if it does."""
        match self.instructions[number]:
            case Run(call, None, _):
                return call
        return None

    def _call(self, group: _Group, number: int, function: str) -> None:
        """Let the group's hosts call a function while the group goes on."""
        start, seconds = max(group.clock, group.host_free), self.seconds[number]
        group.functions[function] = start + seconds
        instruction = self.instructions[number]
        event = Slice(group.ranks[0], group.step, start, seconds, 0.0, instruction, host=True)
        group.events.append(event)
        group.position += 1

    def _collected(self, group: _Group, number: int) -> float:
        """When the function has ended whose outputs or metrics this instruction hands on, if it does."""
        match self.instructions[number]:
            case Send(producer=function) | ShareLengths(call=function):
                return group.functions.get(function, 0.0)
            case Report(function, senders, _) if not group.members.isdisjoint(senders):
                return group.functions.get(function, 0.0)
        return 0.0

    def _start(self, group: _Group, number: int, ready: float) -> float | None:
        """When all that the instruction waits for is there, for a group that is `ready`; None if that is not known
        yet."""
        instruction = self.instructions[number]
        match instruction:
            case Reallocate() if self.seconds[number] == 0:
                return ready  # nothing is sent, so nobody waits
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

    def _everything_left(self, group: _Group) -> float | None:
        """When what the group has sent in this step has been taken; None if that is not known yet."""
        left = 0.0
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
            left = max(left, taken)
        return left

    def _last(
        self,
        log: Mapping[tuple[int, int], Mapping[int, float]],
        step: int,
        numbers: Sequence[int],
        ranks: tuple[int, ...] | None = None,
    ) -> float | None:
        """The latest entry of the groups that execute these instructions, or of those of them that some of
        `ranks` are in; None if one has no entry yet."""
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
    """All different instructions, and each program in their numbers.

    An instruction that comes again in a program has another number each time.
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
            # Ranks mostly share the very objects, whose hashes take long.
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
