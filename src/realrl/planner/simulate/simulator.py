"""Discrete-event simulator of per-rank programs."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

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
"""Number of simulated steps. All ranks start together only in the first step."""
SETTLED = 2
"""Index of the first step that counts as steady state."""

Samples = NDArray[np.float64]
"""Seconds in many samples of a step, [samples]."""
Time = TypeVar("Time", float, Samples)


class SimulationError(Exception):
    """Programs would deadlock, which is a bug of this project."""


@dataclass(frozen=True)
class Simulation:
    """Timeline of several steps. Times are in seconds after the start of the first step."""

    events: Mapping[int, Sequence[Slice]]
    """Executed instructions in order, by rank. Ranks with equal programs form a group, of which only one rank has
    an entry."""
    groups: tuple[int, ...]
    """Rank in `events` that represents each rank."""
    ends: tuple[float, ...]
    """End of each step, when its last rank has finished."""

    @property
    def step_seconds(self) -> float:
        """Seconds of one isolated step, from its start until the last rank has finished it."""
        return self.ends[0]

    @property
    def repeated_seconds(self) -> float:
        return (self.ends[-1] - self.ends[SETTLED - 1]) / (len(self.ends) - SETTLED)

    def slices(self, step: int) -> tuple[tuple[Slice, ...], ...]:
        """Return the timeline of one step by rank. Times count from the start of the first step."""
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

    `seconds`: duration of an instruction once all participants and inputs have arrived. `reporting`: seconds that
    the writing rank needs between two steps, while other ranks begin the next step.

    The simulator blocks ranks as workers block. The ranks of a call start together, and so do the ranks of a
    reallocation that sends data. Sends do not block, and neither does the sender's side of a report. A rank starts
    its next step only when all its messages have been received, because gloo does not buffer a message whose
    receive is not posted. Nothing else synchronises ranks. Each rank runs its functions one after the other, while
    it executes the instructions that follow. It waits for a function before it sends the function's outputs or
    metrics, and at the end of the step. Raises SimulationError for a deadlock.
    """
    simulator = _Simulator(programs, seconds, steps, max, 0.0, reporting)
    ends = simulator.run()
    first_of = {rank: group.ranks[0] for group in simulator.groups for rank in group.ranks}
    return Simulation(
        {group.ranks[0]: group.events for group in simulator.groups},
        tuple(first_of[rank] for rank in range(len(first_of))),
        tuple(ends),
    )


def simulate_samples(
    programs: Sequence[Program],
    seconds: Callable[[Instruction], Samples],
    count: int,
    steps: int = STEPS,
    *,
    reporting: float = 0.0,
) -> Samples:
    """Simulate programs, as `simulate` does, with `count` samples of the duration of each instruction at once.

    Returns the ends of steps, [steps, samples].
    """
    return np.array(_Simulator(programs, seconds, steps, np.maximum, np.zeros(count), reporting).run())


@dataclass
class _Group(Generic[Time]):
    """Ranks with equal programs, which execute in lockstep."""

    ranks: tuple[int, ...]
    program: tuple[int, ...]
    """Indices of its instructions in `_Simulator.instructions`."""
    clock: Time
    step: int = 0
    position: int = 0
    events: list[Slice] = field(default_factory=list)
    """Executed instructions. Empty if many samples are simulated."""
    functions: dict[str, Time] = field(default_factory=dict)
    """Function of this step -> time at which it ends."""

    @cached_property
    def members(self) -> frozenset[int]:
        return frozenset(self.ranks)


class _Simulator(Generic[Time]):
    def __init__(
        self,
        programs: Sequence[Program],
        seconds: Callable[[Instruction], Time],
        steps: int,
        latest: Callable[[Time, Time], Time],
        start: Time,
        reporting: float,
    ) -> None:
        """Prepare a simulation. `latest` returns the later of two times. `start`: start of the first step.
        `reporting`: as in `simulate`."""
        self.steps = steps
        self.reporting = reporting
        self.latest: Callable[[Time, Time], Time] = latest
        self.begin: Time = start
        self.instructions, numbered = _numbered(programs)
        self.seconds: list[Time] = [seconds(instruction) for instruction in self.instructions]
        self.silent = [not np.any(duration) for duration in self.seconds]
        """Whether an instruction takes no time, by index."""
        alike: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
        for rank, program in enumerate(numbered):
            alike[program].append(rank)
        self.groups: list[_Group[Time]] = [
            _Group(tuple(ranks), program, start) for program, ranks in alike.items()
        ]
        self.members: list[list[_Group[Time]]] = [[] for _ in self.instructions]
        for group in self.groups:
            for number in dict.fromkeys(group.program):
                self.members[number].append(group)
        self.sides: dict[object, list[int]] = defaultdict(list)
        """Indices of the instructions on each side of a message, by (message, `Send` or `Receive`)."""
        for number, instruction in enumerate(self.instructions):
            if isinstance(instruction, Send | Receive):
                self.sides[instruction.number, type(instruction)].append(number)
        self.came: dict[tuple[int, int], dict[int, Time]] = defaultdict(dict)
        """Arrival times by (step, instruction) and first rank of a group."""
        self.done: dict[tuple[int, int], dict[int, Time]] = defaultdict(dict)
        """Completion times by (step, instruction) and first rank of a group."""

    def run(self) -> list[Time]:
        """Simulate all steps. Returns the end of each step."""
        ends = [self.begin] * self.steps
        while any(group.step < self.steps for group in self.groups):
            progress = False
            for group in self.groups:
                while group.step < self.steps and self._advance(group, ends):
                    progress = True
            if not progress:
                raise SimulationError(f"no rank can go on: {', '.join(self._waiting())}")
        return ends

    def _waiting(self) -> Iterator[str]:
        for group in (group for group in self.groups if group.step < self.steps):
            if group.position < len(group.program):
                instruction = self.instructions[group.program[group.position]]
                yield f"rank {group.ranks[0]} at {format_instruction(instruction)}"
            else:
                yield f"rank {group.ranks[0]}, of which something is not taken"

    def _advance(self, group: _Group[Time], ends: list[Time]) -> bool:
        """Execute the group's next instruction or start its next step. Returns False if the group still has to
        wait."""
        if group.position == len(group.program):
            received = self._all_received(group)
            if received is None:
                return False
            group.clock = self.latest(group.clock, self._host_free(group))
            ends[group.step] = self.latest(ends[group.step], group.clock)
            group.clock = self.latest(group.clock, received)
            if WRITER in group.members:
                group.clock = group.clock + self.reporting
            group.step += 1
            group.position = 0
            group.functions = {}
            return True
        number = group.program[group.position]
        if (function := self._function(number)) is not None:
            self._call(group, number, function)
            return True
        ready = self.latest(group.clock, self._collected(group, number))
        self.came[group.step, number].setdefault(group.ranks[0], ready)
        start = self._start(group, number, ready)
        if start is None:
            return False
        arrived = group.clock
        group.clock = self.latest(arrived, start) + self.seconds[number]
        self.done[group.step, number][group.ranks[0]] = group.clock
        self._record(group, number, arrived, group.clock, self.latest(self.begin, start - arrived))
        group.position += 1
        return True

    def _function(self, number: int) -> str | None:
        """Return the name of the function that an instruction calls, or None if it calls no function."""
        match self.instructions[number]:
            case Run(call, None, _):
                return call
        return None

    def _call(self, group: _Group[Time], number: int, function: str) -> None:
        """Run a function on the group's hosts while the group continues."""
        start = self.latest(group.clock, self._host_free(group))
        end = group.functions[function] = start + self.seconds[number]
        self._record(group, number, start, end, self.begin, host=True)
        group.position += 1

    def _host_free(self, group: _Group[Time]) -> Time:
        """Return the time at which the last function of a group's step ends."""
        return reduce(self.latest, group.functions.values(), self.begin)

    def _record(
        self, group: _Group[Time], number: int, start: Time, end: Time, waiting: Time, *, host: bool = False
    ) -> None:
        """Record an executed instruction of a group, unless times are arrays of samples."""
        if isinstance(start, float) and isinstance(end, float) and isinstance(waiting, float):
            event = Slice(
                rank=group.ranks[0],
                step=group.step,
                start=start,
                seconds=end - start,
                waiting=waiting,
                instruction=self.instructions[number],
                host=host,
            )
            group.events.append(event)

    def _collected(self, group: _Group[Time], number: int) -> Time:
        """Return the end of the function whose outputs or metrics the instruction sends, or 0 if it sends none."""
        match self.instructions[number]:
            case Send(producer=function) | ShareLengths(call=function):
                return group.functions.get(function, self.begin)
            case Report(function, senders, _) if not group.members.isdisjoint(senders):
                return group.functions.get(function, self.begin)
        return self.begin

    def _start(self, group: _Group[Time], number: int, ready: Time) -> Time | None:
        """Return the time at which all dependencies of the instruction are met, for a group that is ready at
        `ready`. Returns None if this is not known yet."""
        instruction = self.instructions[number]
        match instruction:
            case Reallocate() if self.silent[number]:
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

    def _all_received(self, group: _Group[Time]) -> Time | None:
        """Return the time at which all messages of the group's step have been received, or None if this is not
        known yet."""
        latest = self.begin
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
            latest = self.latest(latest, taken)
        return latest

    def _last(
        self,
        log: Mapping[tuple[int, int], Mapping[int, Time]],
        step: int,
        numbers: Sequence[int],
        ranks: tuple[int, ...] | None = None,
    ) -> Time | None:
        """Return the latest entry of the groups that execute these instructions, or None if a group has no entry
        yet.

        With `ranks`, only groups that contain one of these ranks count.
        """
        latest = self.begin
        for number in numbers:
            entries = log[step, number]
            for group in self.members[number]:
                if ranks is not None and group.members.isdisjoint(ranks):
                    continue
                if group.ranks[0] not in entries:
                    return None
                latest = self.latest(latest, entries[group.ranks[0]])
        return latest


def _numbered(programs: Sequence[Program]) -> tuple[list[Instruction], list[tuple[int, ...]]]:
    """Return the distinct instructions, and each program as indices of these instructions.

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
            # Ranks mostly share the same objects, and hashing them is slow, so they are looked up by identity
            # first.
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
