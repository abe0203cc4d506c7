"""Tooltips of a plan's page, and the colours of roles."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from realrl.cli.page.bands import Block
from realrl.cli.page.text import format_extras, format_interval, format_seconds, format_share, format_strategy
from realrl.config.values import format_bytes
from realrl.dataflow.call import Call
from realrl.planner.simulate.estimate import Estimate
from realrl.program.instructions import Load, Offload, Reallocate, Run
from realrl.program.text import name_parameters

if TYPE_CHECKING:
    from realrl.planner.report.report import PlanReport

_COLOURS = 8


def find_role_class(report: "PlanReport", role: str) -> str:
    """Find the CSS class that gives a role its colour."""
    return f"r{report.scenario.graph.roles.index(role) % _COLOURS}"


def find_call_class(report: "PlanReport", call: Call) -> str:
    """Find the CSS class of a call's colour: that of its role, or that of functions."""
    return "function" if call.role is None else find_role_class(report, call.role)


def make_tip(title: str, rows: Iterable[tuple[str, str]]) -> str:
    """Format a title, then names and values, separated by a tab; rows without a value are left out."""
    return "\n".join([title, *(f"{name}\t{value}" for name, value in rows if value)])


def describe_block(estimate: Estimate, block: Block) -> str:
    """Describe the activity of devices in a block, and its duration."""
    seconds = format_seconds(block.end - block.start)
    when = [("from", f"{block.start:.2f} s"), ("to", f"{block.end:.2f} s")]
    match block.instruction:
        case Run(call):
            return describe_call(estimate, call)
        case Reallocate() as move:
            title, facts = _move_tip(estimate, move)
            return make_tip(title, [*facts, *when])
        case Load(role, _, what, name) | Offload(role, _, what, name):
            verb = "comes from" if isinstance(block.instruction, Load) else "goes to"
            title = f"{what} of {name_parameters(role, name)} {verb} host memory"
            return make_tip(title, [("takes", seconds), *when])
    return make_tip(block.reason.capitalize(), [("takes", seconds), *when])


def describe_call(estimate: Estimate, name: str) -> str:
    """Describe a call with its placement and the terms of its time."""
    call = estimate.calls[name]
    placement = call.placement
    seconds = call.seconds
    facts = [
        ("takes", format_seconds(seconds) if call.terms else "not measured, counted as 0 s"),
        ("mesh", f"devices {format_interval(placement.ranks)}"),
        ("strategy", format_strategy(placement)),
    ]
    if call.call.function is not None:
        facts += [("function", f"{call.call.function}, on the host")]
    else:
        micro_batch = f"{placement.strategy.micro_batch_tokens:,} tokens"
        facts += [("micro-batch", micro_batch), ("with", format_extras(placement))]
    terms = sorted(call.terms.items(), key=lambda item: -item[1])
    shares = [(term, f"{format_seconds(s)} · {format_share(s / seconds)}") for term, s in terms if s > 0]
    return make_tip(name, [*facts, *shares])


def _move_tip(estimate: Estimate, instruction: Reallocate) -> tuple[str, list[tuple[str, str]]]:
    """Describe a reallocation with its layouts and bytes."""
    role = name_parameters(instruction.role, instruction.parameter_set)
    into = instruction.into
    title = f"{role} is reallocated" if into is None else f"{role} is mixed into {into}"
    facts = [("old layout", instruction.source.layout), ("new layout", instruction.target.layout)]
    move = next((m for m in estimate.moves if m.instruction == instruction), None)
    if move is not None:
        facts += [
            ("takes", format_seconds(move.seconds)),
            ("sent", format_bytes(move.sent_bytes)),
            ("between nodes", format_bytes(move.network_bytes)),
        ]
    return title, facts
