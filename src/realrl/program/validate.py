"""Dry run of programs: proves, before any process starts, that all data and parameters arrive and all ranks end."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import get_args

from realrl.dataflow.call import Kind
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
    What,
)
from realrl.program.text import format_instruction


class ProgramError(Exception):
    """Programs that would hang, or run a call without its data or parameters: our bug, not the user's."""


_WHAT: tuple[What, ...] = get_args(What)

MessageKey = tuple[object, ...]
"""Key that identifies a message of the programs."""

Kept = Mapping[str, Sequence[Placement]]
"""Role -> placements of its kept copies."""


@dataclass
class _Rank:
    """State of a rank in the dry run."""

    program: Program
    position: int = 0
    inputs: dict[str, set[str]] = field(default_factory=dict)
    """call -> keys received for it"""
    fed: set[str] = field(default_factory=set)
    lengths: set[str] = field(default_factory=set)
    produced: set[str] = field(default_factory=set)
    """keys this rank holds as a head of their producer"""
    parameters: dict[tuple[str, str], int] = field(default_factory=dict)
    """(role, layout) -> version"""
    offloaded: set[tuple[str, str, What]] = field(default_factory=set)
    """(role, layout, state kind) in host memory"""

    @property
    def current(self) -> Instruction | None:
        instructions = self.program.instructions
        return instructions[self.position] if self.position < len(instructions) else None


class _DryRun:
    """Symbolic execution of programs.

    Instructions over several ranks start when all of them are there, except sends and reports, whose senders
    continue at once, and functions, which every rank calls alone.
    """

    def __init__(
        self,
        programs: Sequence[Program],
        graph: DataflowGraph,
        homes: Mapping[str, Placement],
        offloaded: Collection[tuple[str, What]],
        kept: Kept,
        *,
        copies_there: bool,
    ) -> None:
        """`copies_there`: whether the copies that are kept are there already."""
        self.graph = graph
        self.ranks = [_Rank(program) for program in programs]
        self.versions = dict.fromkeys(homes, 0)
        self.posted: dict[MessageKey, set[int]] = {}
        """message -> ranks that have sent it"""
        self.promised: dict[MessageKey, set[int]] = {}
        """message -> ranks it was sent to"""
        self.received: dict[MessageKey, set[int]] = {}
        self.ran: set[str] = set()
        for role, home in homes.items():
            for rank in home.ranks:
                self.ranks[rank].parameters[role, home.layout] = 0
                for what in _WHAT:
                    if (role, what) in offloaded:
                        self.ranks[rank].offloaded.add((role, home.layout, what))
        self.at_rest = [({*rank.parameters}, {*rank.offloaded}) for rank in self.ranks]
        for role, placement in ((role, p) for role, placements in kept.items() for p in placements):
            for rank in placement.ranks:
                self.at_rest[rank][0].add((role, placement.layout))
                if copies_there:
                    self.ranks[rank].parameters[role, placement.layout] = 0

    def run(self) -> None:
        while any(rank.current is not None for rank in self.ranks):
            progress = [self._advance(rank) for rank in self.ranks]
            if not any(progress):
                waiting = [r.program.rank for r in self.ranks if r.current is not None]
                raise self._error("deadlock: no rank can go on", waiting)
        missing = [call.name for call in self.graph.calls if call.name not in self.ran]
        if missing:
            raise self._error(f"calls never run: {', '.join(missing)}", [])
        for rank, at_rest in zip(self.ranks, self.at_rest, strict=True):
            rests = ({*rank.parameters}, rank.offloaded) == at_rest
            self._need(rank, rests, "ends with other things in memory than there are between steps")
            for (role, layout), version in rank.parameters.items():
                self._need(rank, version == self.versions[role], f"ends with an outdated {role} [{layout}]")
        for message, receivers in self.promised.items():
            if receivers != self.received.get(message, set()):
                raise self._error(f"not received by those it was sent to: {message}", [])

    def _advance(self, rank: _Rank) -> bool:
        """Execute the rank's next instruction if it can start; return whether it did."""
        instruction = rank.current
        match instruction:
            case None:
                return False
            case Feed(keys):
                rank.fed |= set(keys)
                rank.lengths |= set(keys)
            case Send():
                self._send(rank, instruction)
            case Receive():
                return self._receive(rank, instruction)
            case Report():
                return self._report(rank, instruction)
            case Release(role, placement):
                self._need(
                    rank, (role, placement.layout) in rank.parameters, "releases what it does not hold"
                )
                del rank.parameters[role, placement.layout]
            case Offload() | Load():
                self._offload(rank, instruction)
            case Run(role=None):
                self._run_call(instruction, [rank])
            case Run() | Reallocate() | ShareLengths():
                return rank.program.rank == _members(instruction)[0] and self._together(instruction)
        rank.position += 1
        return True

    def _together(self, instruction: Run | Reallocate | ShareLengths) -> bool:
        """Execute an instruction once all ranks it names have reached it."""
        members = [self.ranks[r] for r in _members(instruction)]
        if any(member.current != instruction for member in members):
            return False
        match instruction:
            case Run():
                self._run_call(instruction, members)
            case Reallocate():
                self._reallocate(instruction)
            case ShareLengths(key, _, heads, readers):
                for r in heads:
                    self._need(self.ranks[r], key in self.ranks[r].produced, f"did not produce {key}")
                for r in readers:
                    self.ranks[r].lengths.add(key)
        for member in members:
            member.position += 1
        return True

    def _reallocate(self, instruction: Reallocate) -> None:
        role, target, into = instruction.role, instruction.target, instruction.into
        for r in instruction.source.ranks:
            self._need_parameters(self.ranks[r], role, instruction.source)
        if into is not None:
            for r in target.ranks:
                self._need_parameters(self.ranks[r], into, target)
            self.versions[into] += 1
        for r in target.ranks:
            self.ranks[r].parameters[into or role, target.layout] = self.versions[into or role]

    def _need_parameters(self, rank: _Rank, role: str, placement: Placement) -> None:
        held = rank.parameters.get((role, placement.layout))
        self._need(rank, held is not None, f"has no parameters of {role} in this layout")
        self._need(rank, held == self.versions[role], f"has outdated parameters of {role}")
        offloaded = (role, placement.layout, "parameters") in rank.offloaded
        self._need(rank, not offloaded, f"has the parameters of {role} in host memory")

    def _offload(self, rank: _Rank, instruction: Offload | Load) -> None:
        role, placement, what = instruction.role, instruction.placement, instruction.what
        key = (role, placement.layout, what)
        self._need(rank, key[:2] in rank.parameters, f"has no parameters of {role} in this layout")
        loads = isinstance(instruction, Load)
        place = "device" if loads else "host"
        self._need(
            rank, (key in rank.offloaded) == loads, f"has the {what} of {role} in {place} memory already"
        )
        rank.offloaded ^= {key}

    def _run_call(self, run: Run, members: list[_Rank]) -> None:
        call = self.graph.call(run.call)
        for rank in members:
            known = rank.fed | rank.inputs.get(call.name, set())
            for key in call.inputs:
                self._need(rank, key in known, f"has no {key} for {call.name}")
                length = self.graph.length_key(key)
                self._need(rank, length is None or length in rank.lengths, f"does not know how long {key} is")
            self._need(rank, call.role == run.role, f"runs {call.name} with the model of {run.role}")
            if run.role is not None:
                self._need_parameters(rank, run.role, run.placement)
            offloaded = (run.role, run.placement.layout, "optimizer") in rank.offloaded
            self._need(
                rank,
                call.kind is not Kind.TRAIN or not offloaded,
                f"has the optimizer of {run.role} in host memory",
            )
        if call.kind is Kind.TRAIN and run.role is not None:
            self.versions[run.role] += 1
            for rank in members:
                rank.parameters[run.role, run.placement.layout] = self.versions[run.role]
        for rank in members:
            if rank.program.rank in run.placement.heads:
                rank.produced |= set(call.outputs)
        self.ran.add(call.name)

    def _send(self, rank: _Rank, send: Send) -> None:
        for key in send.keys:
            self._need(rank, key in rank.produced, f"sends {key}, which it does not hold")
            length = self.graph.length_key(key)
            self._need(rank, length is None or length in rank.lengths, f"does not know how long {key} is")
        self._post((send.number, send.keys), rank, send.receivers)

    def _receive(self, rank: _Rank, receive: Receive) -> bool:
        if not self._take((receive.number, receive.keys), rank, receive.senders):
            return False
        rank.inputs.setdefault(receive.consumer, set()).update(receive.keys)
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
        """Receive from all senders if they have sent; return whether they have."""
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


def _members(instruction: Run | Reallocate | ShareLengths) -> tuple[int, ...]:
    match instruction:
        case Run(_, _, placement):
            return placement.ranks
        case Reallocate(_, source, target, _, _):
            return tuple(sorted({*source.ranks, *target.ranks}))
        case ShareLengths(_, _, heads, readers):
            return tuple(sorted({*heads, *readers}))


def validate(
    programs: Sequence[Program],
    graph: DataflowGraph,
    homes: Mapping[str, Placement],
    offloaded: Collection[tuple[str, What]] = (),
    kept: Kept | None = None,
) -> None:
    """Dry-run `programs` of a step; ProgramError, with the position of every rank, when they cannot be run.

    Between steps the parameters of each role are where `homes` says and in the copies that are `kept`;
    `offloaded` says what of which role is in host memory then.
    """
    _DryRun(programs, graph, homes, offloaded, kept or {}, copies_there=True).run()


def validate_start(
    programs: Sequence[Program],
    homes: Mapping[str, Placement],
    offloaded: Collection[tuple[str, What]],
    kept: Kept,
) -> None:
    """Dry-run programs that make the kept copies; ProgramError when they cannot be run."""
    _DryRun(programs, DataflowGraph((), ()), homes, offloaded, kept, copies_there=False).run()
