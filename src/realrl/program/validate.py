"""Dry run of programs. It proves, before any process starts, that data and parameters arrive and that all ranks
finish.

If calls run ahead, the dry run executes short runs. Their first steps only sample, and their last steps sample
nothing. Two complete steps in a row leave the same batches under way, with the same keys on the same ranks. By
induction, a run of any length neither hangs, nor lets a batch wait for ever, nor collects more batches than this.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field

from realrl.dataflow.call import Call, Kind
from realrl.dataflow.graph import DataflowGraph
from realrl.plan.placement import Placement
from realrl.program.instructions import (
    Feed,
    Instruction,
    Load,
    Offload,
    Program,
    Reallocate,
    Receive,
    Release,
    Report,
    Run,
    Send,
    ShareLengths,
    StateKind,
)
from realrl.program.order import (
    TrainableParts,
    dividing_keys,
    list_batches,
    set_names,
    trained_sets,
    transfer_ahead,
)
from realrl.program.text import format_instruction, name_parameters


class ProgramError(Exception):
    """Programs that would hang, or would run a call without its data or parameters. This is our bug, not the
    user's."""


MessageKey = tuple[object, ...]
"""Identifies a message."""

Kept = Mapping[str, Sequence[Placement]]
"""Role -> placements of its kept copies."""


_Copy = tuple[str, str, str]
"""A copy of a parameter set: role, layout, name of the set."""


@dataclass
class _Batch:
    """What one rank knows of one batch."""

    inputs: dict[str, set[str]] = field(default_factory=dict)
    """Call -> keys received for it."""
    fed: set[str] = field(default_factory=set)
    lengths: set[str] = field(default_factory=set)
    produced: set[str] = field(default_factory=set)
    """Keys whose rows this rank has as an output rank of their producer."""


@dataclass
class _Rank:
    """State of one rank in the dry run."""

    program: Program
    position: int = 0
    batches: defaultdict[int, _Batch] = field(default_factory=lambda: defaultdict(_Batch))
    """Batches under way, by the number of steps until they are trained on."""
    parameters: dict[_Copy, int] = field(default_factory=dict)
    """Copy -> version; every update of the role's set increments it."""
    offloaded: set[tuple[_Copy, StateKind]] = field(default_factory=set)
    """State in host memory."""

    @property
    def current(self) -> Instruction | None:
        instructions = self.program.instructions
        return instructions[self.position] if self.position < len(instructions) else None


class _DryRun:
    """Symbolic execution of programs.

    An instruction of several ranks starts when all of them have reached it. Exceptions are sends and reports,
    whose senders continue at once, and functions, which each rank calls on its own.
    """

    def __init__(
        self,
        ranks: int,
        graph: DataflowGraph,
        homes: Mapping[str, Placement],
        offloaded: Collection[tuple[str, StateKind]],
        kept: Kept,
        parts: TrainableParts,
        *,
        copies_there: bool,
        done: Mapping[str, Placement],
    ) -> None:
        """`copies_there` says whether the kept copies exist already. `done` is as in `validate`."""
        self.graph, self.parts, self.done = graph, parts, done
        self.ranks = [_Rank(Program(rank, ())) for rank in range(ranks)]
        self.versions = {(role, name): 0 for role in homes for name in set_names(role, parts)}
        """Current version of each (role, parameter set)."""
        self.at_start = dict(self.versions)
        """Versions at the start of the step."""
        self.posted: dict[MessageKey, set[int]] = {}
        """Message -> ranks that have sent it."""
        self.promised: dict[MessageKey, set[int]] = {}
        """Message -> ranks that it was sent to."""
        self.received: dict[MessageKey, set[int]] = {}
        self.ran: set[str] = {*done}
        self.sampled: dict[tuple[str, int], int] = {}
        """(Generate call, batch) -> version of the parameters with which it began to sample this batch."""
        self.batches: Collection[int] = (0,)
        """Batches on which the step works."""
        for name, placement in done.items():
            for r in placement.output_ranks:
                self.ranks[r].batches[0].produced |= set(graph.call(name).outputs)
        for role, home in homes.items():
            for rank in home.ranks:
                self._place(self.ranks[rank], role, home, offloaded)
        self.at_rest = [({*rank.parameters}, {*rank.offloaded}) for rank in self.ranks]
        for role, placement in ((role, p) for role, placements in kept.items() for p in placements):
            copies = [(role, placement.layout, name) for name in set_names(role, parts)]
            for rank in placement.ranks:
                self.at_rest[rank][0].update(copies)
                if copies_there:
                    self.ranks[rank].parameters |= dict.fromkeys(copies, 0)

    def _place(
        self, rank: _Rank, role: str, home: Placement, offloaded: Collection[tuple[str, StateKind]]
    ) -> None:
        """Give a rank of a role's home the state that it holds when a step starts."""
        for name in set_names(role, self.parts):
            rank.parameters[role, home.layout, name] = 0
            if (role, "parameters") in offloaded:
                rank.offloaded.add(((role, home.layout, name), "parameters"))
        for name in trained_sets(role, self.parts) if (role, "optimizer") in offloaded else ():
            rank.offloaded.add(((role, home.layout, name), "optimizer"))

    def run(self, programs: Sequence[Program], batches: Collection[int] = (0,)) -> None:
        """Execute a step that works on `batches` (see `lower`). Then every batch is one step closer to training."""
        self.at_start, self.batches = dict(self.versions), batches
        for rank, program in zip(self.ranks, programs, strict=True):
            rank.program, rank.position = program, 0
        while any(rank.current is not None for rank in self.ranks):
            progress = [self._advance(rank) for rank in self.ranks]
            if not any(progress):
                waiting = [r.program.rank for r in self.ranks if r.current is not None]
                raise self._error("deadlock: no rank can continue", waiting)
        missing = [c.name for c in self.graph.calls if list_batches(c, batches) and c.name not in self.ran]
        if missing:
            raise self._error(f"calls never run: {', '.join(missing)}", [])
        for rank, at_rest in zip(self.ranks, self.at_rest, strict=True):
            rests = ({*rank.parameters}, rank.offloaded) == at_rest
            self._need(rank, rests, "ends with other state in memory than it holds between steps")
            for (role, layout, name), version in rank.parameters.items():
                current = version == self.versions[role, name]
                self._need(rank, current, f"ends with an outdated {name_parameters(role, name)} [{layout}]")
        for message, receivers in self.promised.items():
            if receivers != self.received.get(message, set()):
                raise self._error(f"message {message} was not received by all ranks that it was sent to", [])
        self._end_step()

    def _end_step(self) -> None:
        for messages in (self.posted, self.promised, self.received):
            messages.clear()
        self.ran.clear()
        self.sampled = {(name, b - 1): version for (name, b), version in self.sampled.items() if b}
        for rank in self.ranks:
            later = {b - 1: batch for b, batch in rank.batches.items() if b}
            rank.batches = defaultdict(_Batch, later)

    def under_way(self) -> list[dict[int, _Batch]]:
        """Copy what every rank knows of the batches under way."""
        return [deepcopy(dict(rank.batches)) for rank in self.ranks]

    def _advance(self, rank: _Rank) -> bool:
        """Execute the rank's next instruction if it can start; return whether it did."""
        instruction = rank.current
        match instruction:
            case None:
                return False
            case Feed(keys):
                batch = rank.batches[self.graph.ahead]
                batch.fed |= set(keys)
                batch.lengths |= set(keys)
            case Send():
                self._send(rank, instruction)
            case Receive():
                return self._receive(rank, instruction)
            case Report():
                return self._report(rank, instruction)
            case Release(role, placement, name):
                copy = (role, placement.layout, name)
                self._need(rank, copy in rank.parameters, "releases what it does not hold")
                del rank.parameters[copy]
            case Offload() | Load():
                self._offload(rank, instruction)
            case Run(role=None):
                self._run_call(instruction, [rank])
            case Run() | Reallocate() | ShareLengths():
                return rank.program.rank == _first_member(instruction) and self._together(instruction)
        rank.position += 1
        return True

    def _together(self, instruction: Run | Reallocate | ShareLengths) -> bool:
        """Execute an instruction if all its ranks have reached it; return whether they have."""
        members = [self.ranks[r] for r in _members(instruction)]
        if any(member.current != instruction for member in members):
            return False
        match instruction:
            case Run():
                self._run_call(instruction, members)
            case Reallocate():
                self._reallocate(instruction)
            case ShareLengths(key, call, output_ranks, readers):
                ahead = self.graph.call(call).ahead
                for r in output_ranks:
                    produced = self.ranks[r].batches[ahead].produced
                    self._need(self.ranks[r], key in produced, f"did not produce {key}")
                for r in readers:
                    self.ranks[r].batches[ahead].lengths.add(key)
        for member in members:
            member.position += 1
        return True

    def _reallocate(self, instruction: Reallocate) -> None:
        role = instruction.role
        target = instruction.target
        into = instruction.into
        name = instruction.parameter_set
        owner = into or role
        for r in instruction.source.ranks:
            self._need_parameters(self.ranks[r], role, instruction.source, name)
        if into is not None:
            for r in target.ranks:
                self._need_parameters(self.ranks[r], into, target, name)
            self.versions[into, name] += 1
        for r in target.ranks:
            self.ranks[r].parameters[owner, target.layout, name] = self.versions[owner, name]

    def _need_parameters(
        self, rank: _Rank, role: str, placement: Placement, name: str, *, trains: bool = True
    ) -> None:
        """Check that a rank has parameters in device memory, in the version of this moment. Calls that do not train
        need the version at the start of the step, because other ranks may be training already."""
        copy = (role, placement.layout, name)
        about = name_parameters(role, name)
        held = rank.parameters.get(copy)
        needed = (self.versions if trains else self.at_start)[role, name]
        self._need(rank, held is not None, f"has no parameters of {about} in this layout")
        problem = (
            f"has outdated parameters of {about}"
            if trains
            else f"has other parameters of {about} than at the start of the step"
        )
        self._need(rank, held == needed, problem)
        self._need(
            rank, (copy, "parameters") not in rank.offloaded, f"has the parameters of {about} in host memory"
        )

    def _offload(self, rank: _Rank, instruction: Offload | Load) -> None:
        role = instruction.role
        name = instruction.parameter_set
        state = instruction.state
        copy = (role, instruction.placement.layout, name)
        about = name_parameters(role, name)
        self._need(rank, copy in rank.parameters, f"has no parameters of {about} in this layout")
        loads = isinstance(instruction, Load)
        already = f"has the {state} of {about} in {'device' if loads else 'host'} memory already"
        self._need(rank, ((copy, state) in rank.offloaded) == loads, already)
        # Loading removes the state, offloading adds it; the check above has excluded the other cases.
        rank.offloaded ^= {(copy, state)}

    def _run_call(self, run: Run, members: list[_Rank]) -> None:
        call = self.graph.call(run.call)
        working = list_batches(call, self.batches)
        for rank, batch in ((rank, rank.batches[number]) for rank in members for number in working):
            known = batch.fed | batch.inputs.get(call.name, set())
            for key in call.inputs:
                self._need(rank, key in known, f"has no {key} for {call.name}")
                length = self.graph.length_key(key)
                self._need(
                    rank, length is None or length in batch.lengths, f"does not know how long {key} is"
                )
        for rank in members:
            self._need(rank, call.role == run.role, f"runs {call.name} with the model of {run.role}")
            for name in () if run.role is None else set_names(run.role, self.parts):
                self._need_parameters(
                    rank, call.model_role, run.placement, name, trains=call.kind is Kind.TRAIN
                )
        self._check_staleness(call)
        for name in trained_sets(call.model_role, self.parts) if call.updates else ():
            copy = (call.model_role, run.placement.layout, name)
            self.versions[call.model_role, name] += 1
            for rank in members:
                there = (copy, "optimizer") not in rank.offloaded
                self._need(rank, there, f"has the optimizer of {call.role} in host memory")
                rank.parameters[copy] = self.versions[call.model_role, name]
        output_ranks = {*run.placement.output_ranks}
        for rank in members:
            if rank.program.rank in output_ranks and call.ahead in working:
                rank.batches[call.ahead].produced |= set(call.outputs)
        self.ran.add(call.name)

    def _check_staleness(self, call: Call) -> None:
        """Check that samples are trained on at most as many updates after sampling as their call runs ahead."""
        if call.role is None:
            return
        version = sum(of for (role, _), of in self.at_start.items() if role == call.role)
        updates = max(1, len(trained_sets(call.role, self.parts)))
        if call.kind is Kind.GENERATE:
            for batch in list_batches(call, self.batches):
                self.sampled.setdefault((call.name, batch), version)
        for (name, batch), sampled in self.sampled.items() if call.kind is Kind.TRAIN else ():
            sampler = self.graph.call(name)
            if (
                batch == 0
                and sampler.role == call.role
                and version - sampled > sampler.begins_ahead * updates
            ):
                old = (version - sampled) // updates
                raise self._error(
                    f"samples of {name} are {old} updates old, more than {sampler.begins_ahead}", []
                )

    def _batch(self, rank: _Rank, message: Send | Receive) -> _Batch:
        producer, consumer = (self.graph.call(name) for name in (message.producer, message.consumer))
        return rank.batches[transfer_ahead(self.graph, producer, consumer)]

    def _send(self, rank: _Rank, send: Send) -> None:
        batch = self._batch(rank, send)
        for key in send.keys:
            self._need(rank, key in batch.produced, f"sends {key}, which it does not hold")
            length = self.graph.length_key(key)
            self._need(rank, length is None or length in batch.lengths, f"does not know how long {key} is")
        self._need_items(rank, send)
        self._post((send.number, send.keys), rank, send.receivers)

    def _need_items(self, rank: _Rank, message: Send | Receive) -> None:
        """Check that a rank knows the lengths that decide which items go to which rank."""
        lengths = self._batch(rank, message).lengths
        for name in (n for n in (message.producer, message.consumer) if n not in self.done):
            for key in dividing_keys(self.graph, self.graph.call(name)):
                problem = f"does not know how long {key} is, by which the items of {name} are divided"
                self._need(rank, key in lengths, problem)

    def _receive(self, rank: _Rank, receive: Receive) -> bool:
        if not self._take((receive.number, receive.keys), rank, receive.senders):
            return False
        self._need_items(rank, receive)
        self._batch(rank, receive).inputs.setdefault(receive.consumer, set()).update(receive.keys)
        return True

    def _report(self, rank: _Rank, report: Report) -> bool:
        if rank.program.rank in report.senders:
            self._post(("report", report.call), rank, (report.receiver,))
            rank.position += 1
            return True
        return self._take(("report", report.call), rank, report.senders)

    def _post(self, message: MessageKey, rank: _Rank, receivers: tuple[int, ...]) -> None:
        self.posted.setdefault(message, set()).add(rank.program.rank)
        self.promised.setdefault(message, set()).update(receivers)

    def _take(self, message: MessageKey, rank: _Rank, senders: tuple[int, ...]) -> bool:
        """Receive a message if all its senders have sent it; return whether they have."""
        if not self.posted.get(message, set()).issuperset(senders):
            return False
        self.received.setdefault(message, set()).add(rank.program.rank)
        rank.position += 1
        return True

    def _need(self, rank: _Rank, condition: bool, problem: str) -> None:
        if not condition:
            raise self._error(f"rank {rank.program.rank} {problem}", [rank.program.rank])

    def _error(self, reason: str, at: list[int]) -> ProgramError:
        lines = [reason]
        for rank in self.ranks:
            here = format_instruction(rank.current) if rank.current is not None else "(end)"
            mark = "   <-- ERROR HERE" if rank.program.rank in at else ""
            lines.append(f"  rank {rank.program.rank} line {rank.position + 1}: {here}{mark}")
        return ProgramError("\n".join(lines))


def _first_member(instruction: Run | Reallocate | ShareLengths) -> int:
    """Find the lowest rank of an instruction. Every rank asks for it repeatedly, so this must not build the list of
    all ranks."""
    match instruction:
        case Run(_, _, placement):
            return placement.mesh.first
        case Reallocate(_, source, target):
            return min(source.mesh.first, target.mesh.first)
        case ShareLengths(_, _, output_ranks, readers):
            return min(output_ranks[0], *readers[:1])


def _members(instruction: Run | Reallocate | ShareLengths) -> tuple[int, ...]:
    match instruction:
        case Run(_, _, placement):
            return placement.ranks
        case Reallocate(_, source, target):
            return tuple(sorted({*source.ranks, *target.ranks}))
        case ShareLengths(_, _, output_ranks, readers):
            return tuple(sorted({*output_ranks, *readers}))


def validate(
    programs: Sequence[Program],
    graph: DataflowGraph,
    homes: Mapping[str, Placement],
    offloaded: Collection[tuple[str, StateKind]] = (),
    kept: Kept | None = None,
    parts: TrainableParts | None = None,
    done: Mapping[str, Placement] | None = None,
) -> None:
    """Dry-run the programs of a step. Raises ProgramError, with the position of every rank, if they cannot run.

    `homes` and `kept` locate each role's parameters and copies between steps; `offloaded` lists the state that is
    then in host memory. `parts` has the trained part of each role that is trained only in part; it determines the
    role's parameter sets. `done` are calls that have already run, with their placements; their outputs exist, and
    every rank knows which rank holds each item.
    """
    run = _DryRun(
        len(programs), graph, homes, offloaded, kept or {}, parts or {}, copies_there=True, done=done or {}
    )
    run.run(programs)


def select_batches(graph: DataflowGraph, step: int, *, first: int = 0, count: int) -> range:
    """Select the batches on which a step works, by the number of steps until they are trained on.

    `step` and `count`, the number of steps of the run, count from 0. Batches from `first` on are sampled. Steps
    before `first` only sample; there are `graph.ahead` of them.
    """
    return range(max(0, first - step), min(graph.ahead + 1, count - step))


def validate_ahead(
    programs_of: Callable[[range], Sequence[Program]],
    graph: DataflowGraph,
    homes: Mapping[str, Placement],
    offloaded: Collection[tuple[str, StateKind]] = (),
    kept: Kept | None = None,
    parts: TrainableParts | None = None,
) -> None:
    """Dry-run a graph whose calls run ahead. Raises ProgramError if a run of any length cannot run.

    `programs_of` compiles the programs of a step that works on the given batches. The other arguments are those of
    `validate`.
    """
    for count in range(1, graph.ahead + 3):
        ranks = len(programs_of(range(graph.ahead + 1)))
        run = _DryRun(ranks, graph, homes, offloaded, kept or {}, parts or {}, copies_there=True, done={})
        before = None
        for step in range(-graph.ahead, count):
            batches = select_batches(graph, step, count=count)
            if not batches:
                continue
            run.run(programs_of(batches), batches)
            if len(batches) == graph.ahead + 1:
                if before is not None and before != run.under_way():
                    raise ProgramError("two steps in a row leave different batches under way")
                before = run.under_way()


def validate_start(
    programs: Sequence[Program],
    homes: Mapping[str, Placement],
    offloaded: Collection[tuple[str, StateKind]],
    kept: Kept,
    parts: TrainableParts | None = None,
) -> None:
    """Dry-run the programs that make the kept copies. Raises ProgramError if they cannot run."""
    empty = DataflowGraph((), ())
    run = _DryRun(len(programs), empty, homes, offloaded, kept, parts or {}, copies_there=False, done={})
    run.run(programs)
