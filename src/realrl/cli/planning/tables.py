"""Report of `realrl plan` on the terminal: the plan, where time and memory go, and alternatives."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from realrl.cli.page import tables as shared
from realrl.cli.page.bars import list_phases
from realrl.cli.page.plan_page import describe_failures, list_remarks
from realrl.cli.page.text import (
    find_largest,
    format_batch,
    format_count_of,
    format_degrees,
    format_devices,
    format_flags,
    format_seconds,
    format_share,
    format_span,
    name_model,
)
from realrl.config.errors import join
from realrl.config.values import format_bytes
from realrl.plan.axes import degrees_title
from realrl.planner.cluster.cluster_spec import ClusterSpec
from realrl.planner.report.report import CHOSEN, FASTEST, Alternative, PlanReport, describe_gap
from realrl.planner.report.shortage_text import describe_full_device
from realrl.planner.simulate.estimate import CONVINCING, LEVEL, DeviceMemory, Estimate, MemoryPart, PartKind

if TYPE_CHECKING:
    from realrl.planner.simulate.scenario import Scenario

_WIDTH = 100
"""Columns of output that does not go to a terminal."""
_BAR = 30
"""Characters of a bar."""
_TERMS, _ALTERNATIVES = 3, 2
"""Number of terms named per call, and number of alternatives shown per call."""
_SMALL = 0.01
"""Terms below this fraction of the devices' time are added up."""
_REST = "activations and the rest"
_KINDS: Mapping[str, str] = {
    PartKind.PARAMETERS: "█",
    PartKind.OPTIMIZER: "▓",
    PartKind.CACHE: "▒",
    _REST: "░",
}
"""Character that draws each kind of memory in a bar. Copies in other layouts and on the host count as `_REST`."""


def print_report(report: PlanReport, source: str, console: Console | None = None) -> None:
    """Print the whole report. `source`: a note on the origin of the predicted times."""
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
        marked = _mark_chosen(shared.make_sizes_table(report))
        reason = f"→ {shared.name_reason(report.objective, report.sizes)}, shown below"
        yield _section("Numbers of nodes", _draw(replace(marked, notes=[*marked.notes, reason])))
    if report.staleness:
        table = shared.make_staleness_table(report)
        yield _section(
            "Asynchrony", _draw(_mark_chosen(table)), Text(f"→ {shared.describe_staleness(report)}")
        )
    if report.goodput:
        yield _section("Failures", *map(Text, describe_failures(report)))
    yield _section("Calls", _calls(chosen, report.scenario))
    moves = shared.make_moves_table(report)
    yield (
        _section("Reallocations", _draw(moves, "start")) if moves.rows else Text("Nothing is reallocated.\n")
    )
    yield _section("Where the devices' time goes", _time_bars(chosen))
    yield _section("Memory of the fullest device", _memory_bars(chosen, report.scenario.spec))
    yield _section("Compared with", _comparison(report))
    if report.alternatives:
        yield _section("Not chosen", _draw(shared.make_alternatives_table(report, _nearest(report)), "step"))


def _mark_chosen(table: shared.Table) -> shared.Table:
    """Add a column with an arrow at the chosen row."""
    marks = ["→" if look else "" for look in table.looks]
    rows = [(mark, *row) for mark, row in zip(marks, table.rows, strict=True)]
    return replace(table, head=("", *table.head), rows=rows, words=table.words + 1)


def _section(title: str, *parts: RenderableType) -> RenderableType:
    return Group(Text(title, style="bold"), *parts, Text(""))


def make_table(*columns: str) -> Table:
    """Make a table without lines. Columns whose name ends in `>` are aligned to the right."""
    made = Table(box=None, pad_edge=False, header_style="italic")
    for name in columns:
        made.add_column(name.rstrip(">"), justify="right" if name.endswith(">") else "left")
    return made


def _draw(table: shared.Table, left_out: str | None = None) -> RenderableType:
    """Draw a table of the HTML page, without the column `left_out`. A repeated name is shown once."""
    columns = [number for number, name in enumerate(table.head) if name != left_out]
    drawn = make_table(*(table.head[i] + ">" * (i >= table.words) for i in columns))
    previous = ""
    for first, *others in ([row[i] for i in columns] for row in table.rows):
        drawn.add_row("" if first == previous else first, *others)
        previous = first
    return Group(drawn, *(Text(note, style="dim") for note in table.notes))


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
    devices, batch = format_devices(scenario.spec), format_batch(scenario)
    return Text(f"{join(models)} on {devices}: {batch}; {source}\n", style="dim")


def _headline(report: PlanReport) -> Text:
    chosen = report.chosen
    kinds = sum(report.candidates.values())
    return Text.assemble(
        (f"One step takes {format_seconds(chosen.step_seconds)}", "bold"),
        f" ({format_share(LEVEL)}: {format_span(report.outlook.interval)};"
        f" {describe_gap(report.gap)}), {chosen.tokens_per_second:,.0f} tokens/s,"
        f" {format_share(chosen.utilisation)} busy, {format_share(chosen.mfu)} MFU.\n",
        f"Found in {format_seconds(report.search_seconds)}: {report.evaluations:,} plans costed, made of"
        f" {kinds:,} ways to run {format_count_of(len(report.candidates), 'call')}.\n",
    )


def _calls(chosen: Estimate, scenario: "Scenario") -> RenderableType:
    rows = make_table("call", "devices", degrees_title(), "micro-batch>", "", "time>", "where it goes")
    for name, call in chosen.calls.items():
        function, placement = call.call.is_function, call.placement
        total = call.seconds or 1.0
        largest = sorted(call.terms.items(), key=lambda item: -item[1])[:_TERMS]
        terms = [f"{term} {format_share(s / total)}" for term, s in largest if s >= 0.01 * total]
        rows.add_row(
            name,
            str(placement.mesh),
            format_degrees(placement, function=function),
            "-" if function else f"{placement.strategy.micro_batch_tokens:,}",
            "" if function else format_flags(placement),
            format_seconds(call.seconds) if call.terms else "not measured",
            "function on the host" if function else ", ".join(terms),
        )
    return Group(rows, *map(Text, list_remarks(chosen.plan, scenario)))


def _time_bars(estimate: Estimate) -> Table:
    """Draw a bar for each term of the devices' time, the largest first."""
    total = sum(estimate.terms.values())
    shares = {name: seconds / total for name, seconds in estimate.terms.items() if seconds >= _SMALL * total}
    shares = dict(sorted(shares.items(), key=lambda item: -item[1]))
    rest = 1 - sum(shares.values())
    rows = Table.grid(padding=(0, 2))
    for name, share in {**shares, **({"everything else": rest} if rest > _SMALL / 10 else {})}.items():
        rows.add_row(name, Text(format_share(share), justify="right"), "█" * max(1, round(share * _BAR)))
    return rows


def _memory_bars(estimate: Estimate, spec: ClusterSpec) -> RenderableType:
    """For the fullest device of each group of nodes, draw a bar of its memory between steps and in each call."""
    parts: list[RenderableType] = []
    first = 0
    for group in spec.groups:
        own = estimate.memory[first : first + group.size]
        first += group.size
        fullest = max(own, key=lambda device: device.peak.bytes / device.capacity)
        title = f"device {fullest.rank}, {group.device.name}, {format_bytes(fullest.capacity)} to use"
        parts += [Text(title), _device_bars(fullest)]
        if fullest.peak.bytes > fullest.capacity:
            parts.append(Text(f"does not fit: {describe_full_device(fullest)}"))
    legend = "   ".join(f"{character} {kind}" for kind, character in _KINDS.items())
    return Group(*parts, Text(legend, style="dim"))


def _device_bars(device: DeviceMemory) -> Table:
    rows = Table.grid(padding=(0, 2))
    rows.add_column(no_wrap=True)
    rows.add_column(no_wrap=True)
    for name, parts in list_phases(device).items():
        size = Text(format_bytes(sum(parts.values())), justify="right")
        most = find_largest(parts) if parts else None
        largest = "" if most is None else f"{most} {format_bytes(parts[most])}"
        rows.add_row(name, _bar(parts, device.capacity), size, largest)
    return rows


def _bar(parts: Mapping[MemoryPart, int], capacity: int) -> str:
    """Draw the used part of a device; dots are free. A bar that does not fit ends in `>`."""
    bar, before = "", 0.0
    for kind, character in _KINDS.items():
        before += sum(size for part, size in parts.items() if _kind(part) == kind) / capacity
        bar += character * (round(before * _BAR) - len(bar))
    return bar.ljust(_BAR, "·") if before <= 1 else bar[: _BAR - 1] + ">"


def _kind(part: MemoryPart) -> str:
    is_copy = part.copy is not None or part.host
    return part.kind if part.kind in _KINDS and not is_copy else _REST


def _comparison(report: PlanReport) -> RenderableType:
    """Show the plans that fit in a table, the fastest first, and a line for each preset that does not."""
    rows = make_table("plan", "step>", f"{format_share(LEVEL)}>", "fastest>", "slower>", "memory>", "")
    remarks = []
    for rival in shared.list_rivals(report):
        if rival.interval:
            figures = (rival.step, rival.interval, rival.fastest, rival.ratio, rival.memory)
            rows.add_row(rival.name, *figures, rival.note)
        else:
            why = "does not fit" if rival.step else "is not possible"
            remarks.append(f"{rival.name} {why}: {rival.note}")
    if report.given_up is not None:
        remarks.append(describe_preference(report))
    if report.outlook.fastest < CONVINCING and len(report.contenders) > 1:
        remarks.append("The first plans are too close to call; --try 3 measures them on the machine itself.")
    return Group(rows, *map(Text, remarks))


def describe_preference(report: PlanReport) -> str:
    """Explain why the chosen plan is preferred to the fastest one. The report must have a faster plan."""
    fastest, chosen = report.given_up, report.contenders[CHOSEN]
    assert fastest is not None, "a faster plan was given up"
    longer = chosen.estimate.step_seconds / fastest.estimate.step_seconds - 1
    text = (
        f"{CHOSEN} is simpler than the {FASTEST}, and may well be as fast: it has {chosen.parts} instead of"
        f" {fastest.parts} layouts, reallocations, kept copies and offloaded states, and its predicted step is only"
        f" {longer:.1%} longer."
    )
    return text.replace("%", " %").capitalize()


def _nearest(report: PlanReport) -> list[Alternative]:
    """Select a few alternatives per call: first alternatives that do not fit, then those with the nearest times."""
    found = []
    for _, group in groupby(report.alternatives, key=lambda other: other.call):
        found += sorted(group, key=lambda other: other.fits)[:_ALTERNATIVES]
    return found
