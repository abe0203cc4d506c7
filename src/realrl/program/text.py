"""Text form of programs: one instruction per line, which can be read back to equal programs."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

from realrl.layout.sets import BASE
from realrl.plan.placement import Mesh, Placement, function_placement
from realrl.program.instructions import (
    Feed,
    Instruction,
    Load,
    Offload,
    OfPortion,
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


def format_ranks(ranks: Sequence[int]) -> str:
    """Format ascending ranks as runs, for example `0-3,8`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(str(Mesh(a, b - a + 1)) for a, b in runs)


def _parse_ranks(text: str) -> tuple[int, ...]:
    return tuple(rank for run in text.split(",") for rank in Mesh.parse(run).ranks)


def _keys(text: str) -> tuple[str, ...]:
    return tuple(key.strip() for key in text.split(","))


def name_parameters(role: str, parameter_set: str) -> str:
    """Name a role's parameter set for people: `actor` for the set `base`, `actor/tuned` for another."""
    return role if parameter_set == BASE else f"{role}/{parameter_set}"


def _split_name(text: str) -> tuple[str, str]:
    role, _, parameter_set = text.partition("/")
    return role, parameter_set or BASE


def format_instruction(instruction: Instruction) -> str:
    """Format an instruction as one line that `parse_instruction` reads back."""
    match instruction:
        case Feed(keys):
            verb, rest = "feed", ", ".join(keys)
        case Reallocate(role, source, target, into, mix, name):
            mixed = "" if mix is None else f" mixed into {into} by {mix!r}"
            verb, rest = "reallocate", f"{name_parameters(role, name)}: {source} -> {target}{mixed}"
        case Release(role, placement, name):
            verb, rest = "release", f"{name_parameters(role, name)}: {placement}"
        case Offload(role, placement, state, name):
            verb, rest = "offload", f"{name_parameters(role, name)} {state}: {placement}"
        case Load(role, placement, state, name):
            verb, rest = "load", f"{name_parameters(role, name)} {state}: {placement}"
        case Run(call, None, placement):
            verb, rest = "run", f"{call} on d{placement.strategy.dp} @{placement.mesh}"
        case Run(call, role, placement):
            verb, rest = "run", f"{call} [{role}] on {placement}"
        case ShareLengths(key, call, output_ranks, readers):
            verb, rest = (
                "lengths",
                f"{key} of {call}: {format_ranks(output_ranks)} -> {format_ranks(readers)}",
            )
        case Send(number, keys, producer, consumer, receivers):
            rest = f"#{number} {', '.join(keys)}: {producer} -> {consumer} on {format_ranks(receivers)}"
            verb = "send"
        case Receive(number, keys, producer, consumer, senders):
            rest = f"#{number} {', '.join(keys)}: {consumer} <- {producer} on {format_ranks(senders)}"
            verb = "receive"
        case Report(call, senders, receiver):
            verb, rest = "report", f"{call}: {format_ranks(senders)} -> {receiver}"
    if isinstance(instruction, OfPortion) and instruction.portion:
        rest += f", portion {instruction.portion}"
    return f"{verb:<10} {rest}"


def _parse_reallocate(name: str, source: str, target: str, into: str | None, mix: str | None) -> Reallocate:
    role, parameter_set = _split_name(name)
    factor = None if mix is None else float(mix)
    return Reallocate(role, Placement.parse(source), Placement.parse(target), into, factor, parameter_set)


def _parse_release(name: str, placement: str) -> Release:
    role, parameter_set = _split_name(name)
    return Release(role, Placement.parse(placement), parameter_set)


def _parse_run(call: str, role: str | None, placement: str) -> Run:
    if role is not None:
        return Run(call, role, Placement.parse(placement))
    match = re.fullmatch(r"d(\d+) @(\S+)", placement)
    if match is None:
        raise ValueError(
            f"function {call}: placement {placement!r} is not understood; write for example d2 @0-1"
        )
    mesh = Mesh.parse(match[2])
    if mesh.size != int(match[1]):
        raise ValueError(f"function {call}: mesh {mesh} has {mesh.size} devices, not {match[1]}")
    return Run(call, None, function_placement(mesh))


def _parse_offload(kind: type[Offload | Load], name: str, state: str, placement: str) -> Offload | Load:
    role, parameter_set = _split_name(name)
    return kind(role, Placement.parse(placement), cast(StateKind, state), parameter_set)


_PART = r"(\S+) (parameters|optimizer): (.+)"
_FORMS: dict[str, tuple[str, Callable[..., Instruction]]] = {
    "feed": (r"(.+)", lambda keys: Feed(_keys(keys))),
    "reallocate": (
        r"(\S+): (.+) -> (.+?)(?: mixed into (\S+) by (\S+))?",
        _parse_reallocate,
    ),
    "release": (r"(\S+): (.+)", _parse_release),
    "offload": (_PART, lambda *texts: _parse_offload(Offload, *texts)),
    "load": (_PART, lambda *texts: _parse_offload(Load, *texts)),
    "run": (r"(\S+)(?: \[(\S+)\])? on (.+)", _parse_run),
    "lengths": (
        r"(\S+) of (\S+): (\S+) -> (\S+)",
        lambda key, call, a, b: ShareLengths(key, call, _parse_ranks(a), _parse_ranks(b)),
    ),
    "send": (
        r"#(\d+) (.+): (\S+) -> (\S+) on (\S+)",
        lambda n, keys, a, b, to: Send(int(n), _keys(keys), a, b, _parse_ranks(to)),
    ),
    "receive": (
        r"#(\d+) (.+): (\S+) <- (\S+) on (\S+)",
        lambda n, keys, b, a, at: Receive(int(n), _keys(keys), a, b, _parse_ranks(at)),
    ),
    "report": (r"(\S+): (\S+) -> (\d+)", lambda call, a, b: Report(call, _parse_ranks(a), int(b))),
}


def parse_instruction(line: str) -> Instruction:
    """Read one line. Raises ValueError if it is not an instruction."""
    verb, _, rest = line.strip().partition(" ")
    if verb in _FORMS:
        pattern, build = _FORMS[verb]
        portion = re.search(r", portion (\d+)$", rest)
        match = re.fullmatch(pattern, rest[: portion.start() if portion else None].strip())
        if match is not None:
            instruction = build(*match.groups())
            if portion is None:
                return instruction
            if isinstance(instruction, OfPortion):
                return replace(instruction, portion=int(portion[1]))
    raise ValueError(f"not an instruction: {line!r}")


def format_program(program: Program) -> str:
    """Format a whole program, headed by its rank."""
    lines = [f"# rank {program.rank}", *(format_instruction(i) for i in program.instructions)]
    return "\n".join(lines) + "\n"


def parse_program(text: str) -> Program:
    """Read what `format_program` writes. Raises ValueError if the text is malformed."""
    head, *lines = text.strip().splitlines()
    match = re.fullmatch(r"# rank (\d+)", head)
    if match is None:
        raise ValueError(f"a program starts with '# rank N', not {head!r}")
    return Program(int(match[1]), tuple(parse_instruction(line) for line in lines))
