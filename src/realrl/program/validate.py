"""Prove, before any process starts, that programs bring data and parameters where they are needed and end."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from realrl.dataflow.graph import DataflowGraph
from realrl.plan.placement import Placement
from realrl.program.instructions import (
    Feed,
    Instruction,
    Program,
    Reallocate,
    Receive,
    Release,
    Report,
    Run,
    Send,
    ShareLengths,
)
from realrl.program.text import format_instruction


class ProgramError(Exception):
    """Programs that would hang, or run a call without its data or parameters: a fault of ours."""


Message = tuple[object, ...]
"""What tells the messages of a program apart."""


@dataclass
class _Rank:
    """What a rank knows while programs are dry-run."""

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

    @property
    def current(self) -> Instruction | None:
        instructions = self.program.instructions
        return instructions[self.position] if self.position < len(instructions) else None


class _DryRun:
    """Executes programs symbolically. Instructions over several ranks start when all of them are there,
    except sends and reports, whose senders go on at once."""

    def __init__(
        self, programs: Sequence[Program], graph: DataflowGraph, homes: Mapping[str, Placement]
    ) -> None:
        self.graph = graph
        self.ranks = [_Rank(program) for program in programs]
        self.versions = dict.fromkeys(homes, 0)
        self.posted: dict[Message, set[int]] = {}
        """message -> ranks that have sent it"""
        self.promised: dict[Message, set[int]] = {}
        """message -> ranks it was sent to"""
        self.received: dict[Message, set[int]] = {}
        self.ran: set[str] = set()
        for role, home in homes.items():
            for rank in home.ranks:
                self.ranks[rank].parameters[role, home.layout] = 0

    def run(self) -> None:
        while any(rank.current is not None for rank in self.ranks):
            progress = [self._advance(rank) for rank in self.ranks]
            if not any(progress):
                waiting = [r.program.rank for r in self.ranks if r.current is not None]
                raise self._error("deadlock: no rank can go on", waiting)
        missing = [call.name for call in self.graph.calls if call.name not in self.ran]
        if missing:
            raise self._error(f"calls never run: {', '.join(missing)}", [])
        for message, receivers in self.promised.items():
            if receivers != self.received.get(message, set()):
                raise self._error(f"not received by those it was sent to: {message}", [])

    def _advance(self, rank: _Rank) -> bool:
        """Execute the rank's next instruction if it can start; whether it did."""
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
            case Report(call, sender, receiver):
                return self._report(rank, call, sender, receiver)
            case Release(role, placement):
                self._need(
                    rank, (role, placement.layout) in rank.parameters, "releases what it does not hold"
                )
                del rank.parameters[role, placement.layout]
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
            case Reallocate(role, source, target):
                version = self.versions[role]
                for r in source.ranks:
                    held = self.ranks[r].parameters.get((role, source.layout))
                    self._need(self.ranks[r], held == version, f"has no current parameters of {role}")
                for r in target.ranks:
                    self.ranks[r].parameters[role, target.layout] = version
            case ShareLengths(key, _, heads, readers):
                for r in heads:
                    self._need(self.ranks[r], key in self.ranks[r].produced, f"did not produce {key}")
                for r in readers:
                    self.ranks[r].lengths.add(key)
        for member in members:
            member.position += 1
        return True

    def _run_call(self, run: Run, members: list[_Rank]) -> None:
        call = self.graph.call(run.call)
        for rank in members:
            known = rank.fed | rank.inputs.get(call.name, set())
            for key in call.inputs:
                self._need(rank, key in known, f"has no {key} for {call.name}")
                length = self.graph.length_key(key)
                self._need(rank, length is None or length in rank.lengths, f"does not know how long {key} is")
            held = rank.parameters.get((call.role, run.placement.layout))
            self._need(rank, held is not None, f"has no parameters of {call.role} in this layout")
            self._need(rank, held == self.versions[call.role], f"has outdated parameters of {call.role}")
        if call.kind == "train":
            self.versions[call.role] += 1
            for rank in members:
                rank.parameters[call.role, run.placement.layout] = self.versions[call.role]
        for head in run.placement.heads:
            self.ranks[head].produced |= set(call.outputs)
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

    def _report(self, rank: _Rank, call: str, sender: int, receiver: int) -> bool:
        if rank.program.rank == sender:
            self._post(("report", call), rank, (receiver,))
            rank.position += 1
            return True
        return self._take(("report", call), rank, (sender,))

    def _post(self, message: Message, rank: _Rank, receivers: tuple[int, ...]) -> None:
        self.posted.setdefault(message, set()).add(rank.program.rank)
        self.promised.setdefault(message, set()).update(receivers)

    def _take(self, message: Message, rank: _Rank, senders: tuple[int, ...]) -> bool:
        """Receive from all senders if they have sent; whether they have."""
        if not self.posted.get(message, set()).issuperset(senders):
            return False
        self.received.setdefault(message, set()).add(rank.program.rank)
        rank.position += 1
        return True

    def _need(self, rank: _Rank, condition: bool, complaint: str) -> None:
        if not condition:
            raise self._error(f"rank {rank.program.rank} {complaint}", [rank.program.rank])

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
        case Reallocate(_, source, target):
            return tuple(sorted({*source.ranks, *target.ranks}))
        case ShareLengths(_, _, heads, readers):
            return tuple(sorted({*heads, *readers}))


def validate(programs: Sequence[Program], graph: DataflowGraph, homes: Mapping[str, Placement]) -> None:
    """Dry-run `programs` of a step; ProgramError, with where every rank stands, when they cannot be run."""
    _DryRun(programs, graph, homes).run()
