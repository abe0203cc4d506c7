"""Tables of a plan's page. The terminal shows some of them, too."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from realrl.cli.page.bars import sort_terms
from realrl.cli.page.text import (
    find_call_class,
    find_role_class,
    format_count,
    format_degrees,
    format_extras,
    format_flags,
    format_layout,
    format_seconds,
    format_share,
    format_span,
)
from realrl.config.values import format_bytes
from realrl.dataflow.call import Kind
from realrl.plan.axes import degrees_title
from realrl.planner.report.report import Objective, format_gap
from realrl.planner.report.shortage_text import describe_misfit
from realrl.program.text import name_parameters

if TYPE_CHECKING:
    from realrl.planner.report.report import Alternative, PlanReport, SizeReport
    from realrl.planner.simulate.estimate import Estimate


@dataclass(frozen=True, kw_only=True)
class Rival:
    """Row of the comparison: a plan or a preset. A figure that is not known is empty."""

    name: str
    percent: float = 0.0
    """Length of the row's bar, in percent of the longest bar."""
    step: str = ""
    interval: str = ""
    fastest: str = ""
    """Probability that this plan is the fastest."""
    ratio: str = ""
    """Step time relative to the chosen plan."""
    memory: str = ""
    note: str = ""
    look: str
    """CSS classes: `chosen`, `unfit` or `refused`."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of text. The first `words` columns hold words, the other columns numbers."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: int
    looks: Sequence[str]
    """CSS classes, by row."""
    calls: Sequence[str] = ()
    """Call of each row; empty for none."""
    notes: Sequence[str] = ()
    """Remarks below the table."""


def list_rivals(report: "PlanReport") -> Iterator[Rival]:
    """Yield the plans that fit, the fastest first. Then yield presets that do not fit or are not possible."""
    longest = _longest(report)

    def describe(
        name: str, estimate: "Estimate", *notes: str, interval: str = "", fastest: str = ""
    ) -> Rival:
        is_chosen = estimate is report.chosen
        return Rival(
            name=name,
            percent=100 * estimate.step_seconds / longest,
            step=format_seconds(estimate.step_seconds),
            interval=interval,
            fastest=fastest,
            ratio="" if is_chosen else f"{estimate.step_seconds / report.chosen.step_seconds:.2f} ×",
            memory=format_bytes(estimate.peak_bytes),
            note=", ".join(filter(None, [*notes, "" if estimate.fits else describe_misfit(estimate)])),
            look="chosen" * is_chosen + " unfit" * (not estimate.fits),
        )

    for name, contender in report.contenders.items():
        preset, outlook = report.presets.get(name), contender.outlook
        note = "with recomputation" if preset is not None and preset.recompute else ""
        interval, fastest = format_span(outlook.interval), format_share(outlook.fastest)
        yield describe(name, contender.estimate, note, interval=interval, fastest=fastest)
    for name, preset in sorted(report.presets.items(), key=lambda item: item[1].estimate is None):
        if preset.estimate is None:
            yield Rival(name=name, note=preset.refused or "", look="refused")
        elif not preset.estimate.fits:
            yield describe(name, preset.estimate)


def place_bound(report: "PlanReport") -> float:
    """Compute the position of the lower bound in percent, on the scale of the bars of `list_rivals`."""
    return 100 * report.lower_bound_seconds / _longest(report)


def _longest(report: "PlanReport") -> float:
    others = [preset.estimate for preset in report.presets.values() if preset.estimate]
    return max(estimate.step_seconds for estimate in (report.chosen, *others))


def make_calls_table(report: "PlanReport") -> Table:
    """Make a row per call, in the order in which calls start, with its placement and the terms of its time."""
    calls = report.chosen.calls
    terms = sort_terms({term: s for call in calls.values() for term, s in call.terms.items() if s > 0})
    rows = []
    for name, call in calls.items():
        placement, function = call.placement, call.call.is_function
        settings = "on the host" if function else format_extras(placement)
        words = (name, str(placement.mesh), format_degrees(placement, function=function), settings)
        micro_batch = "" if function else f"{placement.strategy.micro_batch_tokens:,}"
        seconds = _short(call.seconds) if call.terms else "not measured"
        numbers = [_short(call.terms.get(term, 0.0)) for term in terms]
        rows.append((*words, micro_batch, f"{call.start:.2f}", seconds, *numbers))
    return Table(
        head=("call", "devices", degrees_title(), "with", "micro-batch", "start", "seconds", *terms),
        rows=rows,
        words=4,
        looks=[find_call_class(report, call.call) for call in calls.values()],
        calls=[*calls],
    )


def make_moves_table(report: "PlanReport") -> Table:
    """Make a row per reallocation."""
    rows, looks = [], []
    for move in report.chosen.moves:
        i = move.instruction
        what = name_parameters(i.role, i.parameter_set) + (f" into {i.into}" if i.into else "")
        sizes = (format_bytes(move.sent_bytes), format_bytes(move.network_bytes))
        row = (
            what,
            move.before or "after the update",
            format_layout(i.source),
            format_layout(i.target),
            *sizes,
        )
        rows.append((*row, f"{move.start:.2f}", format_seconds(move.seconds)))
        looks.append(find_role_class(report, i.into or i.role))
    return Table(
        head=("role", "for", "from", "to", "sent", "between nodes", "start", "time"),
        rows=rows,
        words=4,
        looks=looks,
        calls=[move.before or "" for move in report.chosen.moves],
    )


def make_sizes_table(report: "PlanReport") -> Table:
    """Make a row per number of nodes that was compared.

    Speed-up is relative to the smallest cluster that has a plan. Efficiency is speed-up per device. Both columns
    are left out if the kinds of devices differ.
    """
    sizes, one_kind = report.sizes, len({size.kind for size in report.sizes}) == 1
    priced = all(size.price is not None for size in sizes)
    base = min((size for size in sizes if size.estimate), key=lambda size: size.nodes, default=None)
    shown = {
        "speed-up": one_kind,
        "efficiency": one_kind,
        "price": priced,
        "an hour": priced and report.objective in ("step", "budget"),
    }
    figures = ("step", "tokens/s", "speed-up", "efficiency", "device-hours", "price", "an hour", "gap")
    columns = [name for name in figures if shown.get(name, True)]
    rows = []
    for size in sizes:
        cells = _size_figures(size, base) if base and size.estimate else dict.fromkeys(columns, "-")
        rows.append((f"{size.kind}:{size.nodes:,}", f"{size.devices:,}", *(cells[name] for name in columns)))
    return Table(
        head=("nodes", "devices", *columns),
        rows=rows,
        words=1,
        looks=["chosen" if size.cluster == report.scenario.spec.name else "" for size in sizes],
        notes=[
            *(f"no plan for {size.cluster}: {size.refused}" for size in sizes if size.refused),
            f"{'device-hours and price are' if priced else 'device-hours are'} for 1,000 steps",
        ],
    )


def _size_figures(size: "SizeReport", base: "SizeReport") -> dict[str, str]:
    assert size.estimate is not None, "only sizes with a plan have figures"
    faster = base.step_seconds / size.step_seconds
    return {
        "step": format_seconds(size.step_seconds),
        "tokens/s": format_count(size.estimate.tokens_per_second),
        "speed-up": f"{faster:.2f} ×",
        "efficiency": format_share(faster * base.devices / size.devices),
        "device-hours": f"{1000 * size.device_hours:,.4g}",
        "price": f"{1000 * (size.price or 0.0):,.4g}",
        "an hour": f"{size.price_per_hour or 0.0:,.4g}",
        "gap": format_gap(size.gap or 0.0),
    }


def name_reason(objective: Objective, sizes: Sequence["SizeReport"]) -> str:
    """Describe why a number of nodes was chosen."""
    priced = all(size.price is not None for size in sizes)
    return {
        "time": "fastest",
        "cost": "cheapest" if priced else "fewest device-hours",
        "step": f"{'cheapest' if priced else 'fewest nodes'} with a short enough step",
        "budget": "fastest within the budget",
    }[objective]


def make_staleness_table(report: "PlanReport") -> Table:
    """Make a row per settings of asynchrony. Speed-ups are relative to a synchronous step."""
    rows, base = [], report.staleness[0].estimate
    graph = report.scenario.graph
    for row in report.staleness:
        figures: tuple[str, ...] = ("no plan", "", "", "", "")
        if row.estimate is not None:
            plan, seconds = row.estimate.plan, row.estimate.step_seconds
            places = [
                ", ".join(
                    dict.fromkeys(str(plan[call.name].mesh) for call in graph.order if call.kind is kind)
                )
                for kind in (Kind.GENERATE, Kind.TRAIN)
            ]
            gain = "" if base is None else f"{base.step_seconds / seconds:.2f} ×"
            figures = (format_seconds(seconds), gain, *places, format_gap(row.gap))
        of = row.settings
        how = "partial" if of.partial else "whole" if of.staleness else "-"
        how = f"{of.portions} portions" if of.portions > 1 else how
        overlaps = "yes" if of.active and of.overlap else "no"
        rows.append((str(of.staleness), how, overlaps, *figures))
    return Table(
        head=("staleness", "answers", "overlap", "step", "speed-up", "generation on", "training on", "gap"),
        rows=rows,
        words=3,
        looks=["chosen" if row.estimate is report.chosen else "" for row in report.staleness],
        notes=[f"no plan: {row.refused}" for row in report.staleness if row.refused],
    )


def describe_staleness(report: "PlanReport") -> str:
    """Describe what asynchrony gains, and which settings it needs. Empty if nothing was compared."""
    if not report.staleness:
        return ""
    base = report.staleness[0].estimate
    chosen = next(row for row in report.staleness if row.estimate is report.chosen)
    if not chosen.settings.active:
        return "asynchrony gains less than 1 %, so the plan below is synchronous"
    given = chosen.settings.model_dump(exclude_defaults=True)
    settings = " ".join(f"asynchrony.{name}={str(value).lower()}" for name, value in given.items())
    if base is None:
        return f"no synchronous plan fits; the plan below needs {settings}"
    gain = base.step_seconds / report.chosen.step_seconds
    return f"the plan below is {gain:.2f} × as fast as a synchronous one; it needs {settings}"


def make_alternatives_table(report: "PlanReport", alternatives: Sequence["Alternative"]) -> Table:
    """Make a row per rejected alternative, sorted by call."""
    order = list(report.chosen.calls)
    found = sorted(alternatives, key=lambda a: (order.index(a.call), not a.fits, a.step_seconds))
    classes = [find_call_class(report, report.scenario.graph.call(a.call)) for a in found]
    return Table(
        head=("call", "devices", degrees_title(), "with", "why not", "micro-batch", "step"),
        rows=[_alternative(a) for a in found],
        words=5,
        looks=[look if a.fits else f"{look} unfit" for a, look in zip(found, classes, strict=True)],
        calls=[a.call for a in found],
    )


def _alternative(other: "Alternative") -> tuple[str, ...]:
    strategy = other.placement.strategy
    settings = [
        format_flags(replace(other.placement, strategy=replace(strategy, dtype=other.dtype))),
        *(f"offload {what}" for what in other.offload),
        *(f"no offload of {what}" for what in other.on_device),
        "" if other.keep is None else "copies kept" if other.keep else "no copies kept",
    ]
    return (
        other.call,
        str(other.placement.mesh),
        format_degrees(other.placement, function=other.function),
        ", ".join(filter(None, settings)),
        other.reason,
        "" if other.function else f"{strategy.micro_batch_tokens:,}",
        format_seconds(other.step_seconds) if other.fits else "does not fit",
    )


def _short(seconds: float) -> str:
    """Format seconds for a table column. 0 becomes a dot."""
    return f"{seconds:.2f}" if seconds >= 0.005 else "·" if not seconds else "0.00"
