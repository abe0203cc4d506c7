"""Output of `realrl plan`: the plan, the terms of its time, and alternatives."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from realrl.cli.page.text import (
    find_largest,
    format_batch,
    format_count_of,
    format_devices,
    format_seconds,
    format_share,
    format_span,
    name_model,
)
from realrl.cli.page.words import list_remarks
from realrl.cli.planning.bars import format_memory_bars, format_time_bars
from realrl.cli.planning.failures import describe_failures
from realrl.cli.planning.node_counts_table import make_size_table
from realrl.config.errors import join
from realrl.config.values import format_bytes
from realrl.plan.axes import degrees_title
from realrl.plan.placement import Placement
from realrl.planner.report.report import Alternative, Contender, PlanReport, describe_gap
from realrl.planner.simulate.estimate import CONVINCING, LEVEL, CallEstimate, Estimate
from realrl.program.text import name_parameters

if TYPE_CHECKING:
    from realrl.planner.simulate.scenario import Scenario
from realrl.planner.report.report import CHOSEN, FASTEST


def describe_preference(report: PlanReport) -> str:
    """Say what the chosen plan is preferred to, and why; the report must have given up a faster plan."""
    fastest, chosen = report.given_up, report.contenders[CHOSEN]
    assert fastest is not None, "a faster plan was given up"
    longer = chosen.estimate.step_seconds / fastest.estimate.step_seconds - 1
    text = (
        f"{CHOSEN} is simpler than the {FASTEST}, and may well be as fast: {chosen.parts} instead of"
        f" {fastest.parts} layouts, reallocations, kept copies and offloaded states, for a step that is predicted"
        f" to be {longer:.1%} longer."
    )
    return text.replace("%", " %").capitalize()


_WIDTH = 100
"""Columns where the terminal does not report its width."""
_TERMS, _ALTERNATIVES = 3, 2
"""Number of terms named per call, and number of alternatives shown."""


def print_report(report: PlanReport, source: str, console: Console | None = None) -> None:
    """Print the whole report. `source`: origin of the times."""
    console = console or Console(highlight=False)
    if not console.is_terminal:
        console.width = _WIDTH
    for part in _parts(report, source):
        console.print(part)


def _parts(report: PlanReport, source: str) -> Iterator[RenderableType]:
    chosen = report.chosen
    yield _setting(report, source)
    yield _headline(report)
    if report.sizes:
        yield _section(
            "Numbers of nodes", make_size_table(report.sizes, report.scenario.spec.name, report.objective)
        )
    if report.goodput:
        yield _section("Failures", *map(Text, describe_failures(report)))
    yield _section("Calls", _calls(chosen, report.scenario))
    yield _section("Reallocations", _moves(chosen)) if chosen.moves else Text("Nothing is reallocated.\n")
    yield _section("Where the devices' time goes", format_time_bars(chosen))
    yield _section("Memory of the fullest device", format_memory_bars(chosen, report.scenario.spec))
    yield _section("Compared with", _comparison(report))
    if report.alternatives:
        yield _section("Not chosen", _alternatives(report))


def _section(title: str, *parts: RenderableType) -> RenderableType:
    return Group(Text(title, style="bold"), *parts, Text(""))


def make_table(*columns: str) -> Table:
    """Make a table without lines. Columns whose name ends in `>` are aligned to the right."""
    made = Table(box=None, pad_edge=False, header_style="italic")
    for name in columns:
        made.add_column(name.rstrip(">"), justify="right" if name.endswith(">") else "left")
    return made


def _setting(report: PlanReport, source: str) -> Text:
    scenario = report.scenario
    roles = {
        role: f"{name_model(model)}{f' in {model.shape.quantised}' if model.shape.quantised else ''}"
        for role, model in scenario.models.items()
    }
    models = [
        f"{name} ({', '.join(role for role in roles if roles[role] == name)})"
        for name in dict.fromkeys(roles.values())
    ]
    return Text(
        f"{join(models)} on {format_devices(scenario.spec)}: {format_batch(scenario)}; {source}\n",
        style="dim",
    )


def _headline(report: PlanReport) -> Text:
    chosen = report.chosen
    kinds = sum(report.candidates.values())
    return Text.assemble(
        (f"One step takes {format_seconds(chosen.step_seconds)}", "bold"),
        f" ({LEVEL:.0%}: {format_span(report.outlook.interval)};".replace("%:", " %:"),
        f" {describe_gap(report.gap)}), {chosen.tokens_per_second:,.0f} tokens/s,"
        f" {format_share(chosen.utilisation)} busy, {format_share(chosen.mfu)} MFU.\n",
        f"Found in {format_seconds(report.search_seconds)}: {report.evaluations:,} plans costed, made of"
        f" {kinds:,} ways to run {format_count_of(len(report.candidates), 'call')}.\n",
    )


def format_degrees(placement: Placement, *, function: bool = False) -> str:
    """Format degrees of parallelism, for example `2×8×4`; of a function, that of data parallelism alone."""
    s = placement.strategy
    return f"{s.dp}" if function else s.degrees.in_table()


def _format_layout(placement: Placement) -> str:
    """Format where parameters lie, and how: for example `2×8×4 @0-63`, or `8×1×1 @0-7 ZeRO-3 bfloat16`."""
    s = placement.strategy
    how = ["ZeRO-3"] * s.shards_parameters + ([s.dtype] if s.dtype else [])
    return " ".join([f"{format_degrees(placement)} @{placement.mesh}", *how])


def format_flags(placement: Placement) -> str:
    """Format the settings of a strategy that a table names: all but sequence parallelism, which most of tp have."""
    return ", ".join(name for name in placement.strategy.settings if name != "sequence parallel")


def _calls(chosen: Estimate, scenario: "Scenario") -> RenderableType:
    rows = make_table("call", "devices", degrees_title(), "micro-batch>", "", "time>", "where it goes")
    for name, call in chosen.calls.items():
        if call.call.is_function:
            seconds = format_seconds(call.seconds) if call.terms else "not measured"
            mesh, dp = str(call.placement.mesh), format_degrees(call.placement, function=True)
            rows.add_row(name, mesh, dp, "-", "", seconds, "function on the host")
            continue
        rows.add_row(
            name,
            str(call.placement.mesh),
            format_degrees(call.placement),
            f"{call.placement.strategy.micro_batch_tokens:,}",
            format_flags(call.placement),
            format_seconds(call.seconds),
            _largest_terms(call),
        )
    return Group(rows, *map(Text, list_remarks(chosen.plan, scenario)))


def _largest_terms(call: CallEstimate) -> str:
    total = call.seconds or 1.0
    largest = sorted(call.terms.items(), key=lambda item: -item[1])[:_TERMS]
    return ", ".join(f"{name} {format_share(s / total)}" for name, s in largest if s >= 0.01 * total)


def _moves(chosen: Estimate) -> Table:
    rows = make_table("model", "before", "from", "to", "time>", "sent>", "between nodes>")
    for move in chosen.moves:
        source = move.instruction.source
        target = move.instruction.target
        name = name_parameters(move.instruction.role, move.instruction.parameter_set)
        into = move.instruction.into
        rows.add_row(
            name if into is None else f"{name} into {into}",
            move.before or "-",
            _format_layout(source),
            _format_layout(target),
            format_seconds(move.seconds),
            format_bytes(move.sent_bytes),
            format_bytes(move.network_bytes),
        )
    return rows


def _comparison(report: PlanReport) -> RenderableType:
    """Show the plans that fit, the fastest first, with intervals and probabilities, then presets that do not."""
    rows = make_table(
        "plan", "step>", f"{LEVEL:.0%}>".replace("%", " %"), "fastest>", "slower>", "memory>", ""
    )
    for name, contender in report.contenders.items():
        preset = report.presets.get(name)
        remark = "with recomputation" if preset is not None and preset.recompute else ""
        rows.add_row(name, *_figures(contender, report.chosen), remark)
    for name, preset in report.presets.items():
        if preset.estimate is None:
            rows.add_row(name, "-", "-", "-", "-", "-", f"not possible: {preset.refused}")
        elif not preset.estimate.fits:
            figures = ("-", "-", "-", "-", format_bytes(preset.estimate.peak_bytes))
            rows.add_row(name, *figures, f"does not fit: {_blame(preset.estimate)}")
    return Group(rows, *map(Text, _remarks(report)))


def _remarks(report: PlanReport) -> Iterator[str]:
    """Say why the chosen plan is not the fastest, and what tells near ones apart."""
    if report.given_up is not None:
        yield describe_preference(report)
    if report.outlook.fastest < CONVINCING and len(report.contenders) > 1:
        yield (
            "Predictions do not tell the first ones apart for sure; on the machine itself, --try 3 measures them."
        )


def _blame(estimate: Estimate) -> str:
    """Name the largest memory part of the fullest device."""
    peak = estimate.peak_device.peak
    return f"{find_largest(peak.parts)} {format_bytes(max(peak.parts.values()))} in {peak.during}"


def _figures(contender: Contender, chosen: Estimate) -> tuple[str, ...]:
    estimate, outlook = contender.estimate, contender.outlook
    factor = estimate.step_seconds / chosen.step_seconds
    return (
        format_seconds(estimate.step_seconds),
        format_span(outlook.interval),
        format_share(outlook.fastest),
        "" if estimate is chosen else f"{factor:.2f} ×",
        format_bytes(estimate.peak_bytes),
    )


def _alternatives(report: PlanReport) -> Table:
    rows = make_table("call", "devices", degrees_title(), "micro-batch>", "why not")
    for name, found in groupby(report.alternatives, key=lambda other: other.call):
        for number, other in enumerate(_few(list(found))):
            strategy = other.placement.strategy
            flags = [
                "" if other.dtype is None else f"in {other.dtype}",
                "recomputing" if strategy.recompute else "",
                f"ZeRO-{strategy.zero}" if strategy.zero > 1 else "",
                "offloading" if other.offload else "without offloading" if other.on_device else "",
                "" if other.keep is None else "keeping copies" if other.keep else "keeping no copies",
            ]
            rows.add_row(
                "" if number else name,
                str(other.placement.mesh),
                *_how(other),
                ": ".join(filter(None, (", ".join(filter(None, flags)), other.reason))),
            )
    return rows


def _how(other: Alternative) -> tuple[str, str]:
    """Degrees and micro-batch of an alternative; of a function, its degree of data parallelism."""
    degrees = format_degrees(other.placement, function=other.function)
    return degrees, "-" if other.function else f"{other.placement.strategy.micro_batch_tokens:,}"


def _few(found: Sequence[Alternative]) -> Iterable[Alternative]:
    """Select the alternatives that would be faster but do not fit, and the nearest of the others."""
    return [*(o for o in found if not o.fits), *(o for o in found if o.fits)][:_ALTERNATIVES]
