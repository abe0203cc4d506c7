"""Tables of a plan's page: presets, calls, reallocations, and rejected alternatives."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from realrl.cli.page.sections import TERMS
from realrl.cli.page.text import (
    format_count,
    format_extras,
    format_interval,
    format_seconds,
    format_share,
    format_span,
    format_strategy,
)
from realrl.cli.page.tips import find_call_class, find_role_class
from realrl.config.values import format_bytes
from realrl.planner.report.shortage_text import describe_misfit
from realrl.planner.simulate.estimate import LEVEL
from realrl.program.text import name_parameters

if TYPE_CHECKING:
    from realrl.planner.report.alternatives import Alternative
    from realrl.planner.report.report import PlanReport


@dataclass(frozen=True)
class Rival:
    """Row of the comparison: a plan or a preset."""

    name: str
    percent: float
    """Length of its bar."""
    value: str
    ratio: str
    note: str
    look: str


@dataclass(frozen=True)
class Table:
    """Rows of text; the first `words` columns are words, the others numbers."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: int
    looks: tuple[str, ...]
    """CSS classes, by row."""
    calls: tuple[str, ...]
    """Call that each row is about; empty for none."""


def list_rivals(report: "PlanReport") -> list[Rival]:
    """List the plans that fit, the fastest first, presets that do not fit, and those that do not exist."""
    return [*_list_contenders(report), *_list_misfits(report)]


def _list_contenders(report: "PlanReport") -> Iterator[Rival]:
    chosen, longest = report.chosen, _longest(report)
    for name, contender in report.contenders.items():
        estimate, outlook = contender.estimate, contender.outlook
        is_chosen = estimate is chosen
        preset = report.presets.get(name)
        notes = [
            "with recomputation" if preset is not None and preset.recompute else "",
            f"{format_span(outlook.interval)} ({format_share(LEVEL)})",
            f"fastest with {format_share(outlook.fastest)}",
            "" if estimate.fits else describe_misfit(estimate),
        ]
        yield Rival(
            name="this plan" if is_chosen else name,
            percent=100 * estimate.step_seconds / longest,
            value=format_seconds(estimate.step_seconds),
            ratio="" if is_chosen else f"{estimate.step_seconds / chosen.step_seconds:.2f} ×",
            note=", ".join(filter(None, notes)),
            look="chosen" * is_chosen + " unfit" * (not estimate.fits),
        )


def _list_misfits(report: "PlanReport") -> Iterator[Rival]:
    longest = _longest(report)
    for name, preset in sorted(report.presets.items(), key=lambda item: item[1].estimate is None):
        estimate = preset.estimate
        if estimate is None:
            yield Rival(name=name, percent=0.0, value="", ratio="", note=preset.refused or "", look="refused")
        elif not estimate.fits:
            yield Rival(
                name=name,
                percent=100 * estimate.step_seconds / longest,
                value=format_seconds(estimate.step_seconds),
                ratio=f"{estimate.step_seconds / report.chosen.step_seconds:.2f} ×",
                note=describe_misfit(estimate),
                look="unfit",
            )


def place_bound(report: "PlanReport") -> float:
    """Place the lower bound on the scale of `list_rivals`."""
    return 100 * report.lower_bound_seconds / _longest(report)


def _longest(report: "PlanReport") -> float:
    """Find the seconds of the longest bar."""
    others = [preset.estimate for preset in report.presets.values() if preset.estimate]
    return max(estimate.step_seconds for estimate in (report.chosen, *others))


def make_calls_table(report: "PlanReport") -> Table:
    """Make a row per call in the order they start, with its placement and the terms of its time."""
    calls = report.chosen.calls
    used = {term for call in calls.values() for term, seconds in call.terms.items() if seconds > 0}
    terms = [*(term for term in TERMS if term in used), *sorted(used - set(TERMS))]
    rows = []
    for name, call in calls.items():
        placement = call.placement
        given = "on the host" if call.call.is_function else format_extras(placement)
        words = (name, format_interval(placement.ranks), format_strategy(placement), given)
        numbers = [_short(call.terms.get(term, 0.0)) for term in terms]
        micro_batch = "" if call.call.is_function else f"{placement.strategy.micro_batch_tokens:,}"
        seconds = _short(call.seconds) if call.terms else "not measured"
        rows.append((*words, micro_batch, f"{call.start:.2f}", seconds, *numbers))
    head = ("call", "devices", "strategy", "with", "micro-batch", "start", "seconds", *terms)
    looks = tuple(find_call_class(report, call.call) for call in calls.values())
    return Table(head=head, rows=tuple(rows), words=4, looks=looks, calls=tuple(calls))


def make_moves_table(report: "PlanReport") -> Table:
    """Make a row per reallocation."""
    rows = []
    looks = []
    for move in report.chosen.moves:
        i = move.instruction
        what = name_parameters(i.role, i.parameter_set) + (f" into {i.into}" if i.into else "")
        sizes = (format_bytes(move.sent_bytes), format_bytes(move.network_bytes))
        row = (what, i.source.layout, i.target.layout, move.before or "after the update", *sizes)
        rows.append((*row, f"{move.start:.2f}", _short(move.seconds)))
        looks.append(find_role_class(report, i.into or i.role))
    head = ("parameters of", "from", "to", "for", "sent", "between nodes", "start", "seconds")
    return Table(
        head=head,
        rows=tuple(rows),
        words=4,
        looks=tuple(looks),
        calls=tuple(m.before or "" for m in report.chosen.moves),
    )


def make_sizes_table(report: "PlanReport") -> Table:
    """Make a row per number of nodes that was compared."""
    sizes = report.sizes
    priced = all(size.price is not None for size in sizes)
    base = min((size for size in sizes if size.estimate), key=lambda size: size.nodes, default=None)
    rows = []
    for size in sizes:
        counts = (f"{size.kind}:{size.nodes:,}", f"{size.devices:,}")
        if size.estimate is None or base is None:
            rows.append((*counts, f"no plan: {size.refused}", *[""] * (6 + priced)))
            continue
        faster = base.step_seconds / size.step_seconds
        figures = (
            format_seconds(size.step_seconds),
            format_count(size.estimate.tokens_per_second),
            f"{faster:.2f} ×",
            format_share(faster * base.devices / size.devices),
            f"{1000 * size.device_hours:,.4g}",
            *([f"{1000 * (size.price or 0.0):,.4g}"] if priced else []),
            format_share(size.gap or 0.0),
        )
        rows.append((*counts, "", *figures))
    price = ["price / 1,000"] if priced else []
    head = (
        "nodes",
        "devices",
        "",
        "step",
        "tokens/s",
        "speed-up",
        "efficiency",
        "device-hours / 1,000",
        *price,
        "gap",
    )
    looks = ["chosen" if size.cluster == report.scenario.spec.name else "" for size in sizes]
    return Table(head=head, rows=tuple(rows), words=3, looks=tuple(looks), calls=("",) * len(sizes))


def make_alternatives_table(report: "PlanReport") -> Table:
    """Make a row per rejected alternative, by call."""
    order = list(report.chosen.calls)
    found = sorted(report.alternatives, key=lambda a: (order.index(a.call), not a.fits, a.step_seconds))
    rows = tuple(_alternative(alternative) for alternative in found)
    looks = tuple(
        f"{find_call_class(report, report.scenario.graph.call(a.call))}{'' if a.fits else ' unfit'}"
        for a in found
    )
    head = ("call", "devices", "strategy", "micro-batch", "with", "why not", "step")
    return Table(head=head, rows=rows, words=6, looks=looks, calls=tuple(a.call for a in found))


def _alternative(other: "Alternative") -> tuple[str, ...]:
    offload = [f"offload {what}" for what in other.offload]
    copies = [] if other.keep is None else ["copies kept" if other.keep else "no copies kept"]
    extras = format_extras(
        replace(other.placement, strategy=replace(other.placement.strategy, dtype=other.dtype))
    )
    given = ", ".join(filter(None, [extras, *offload, *copies]))
    devices = format_interval(other.placement.ranks)
    degrees = format_strategy(other.placement)
    step = format_seconds(other.step_seconds) if other.fits else "does not fit"
    micro_batch = "" if other.function else f"{other.placement.strategy.micro_batch_tokens:,}"
    return other.call, devices, degrees, micro_batch, given, other.reason, step


def _short(seconds: float) -> str:
    """Format seconds in a column; a dot for none."""
    return f"{seconds:.2f}" if seconds >= 0.005 else "·" if not seconds else "0.00"
