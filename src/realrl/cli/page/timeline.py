"""Picture of a step: devices from top to bottom, time from left to right."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from math import floor, log10
from typing import TYPE_CHECKING

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from realrl.cli.page.bands import Area, Band, Block, find_areas, find_bands
from realrl.cli.page.text import (
    find_role_class,
    format_count_of,
    format_extras,
    format_interval,
    format_seconds,
    format_share,
    format_strategy,
    make_tip,
)
from realrl.config.values import format_bytes
from realrl.planner.cluster.cluster_spec import ClusterSpec
from realrl.planner.simulate.estimate import CallEstimate, Estimate
from realrl.program.instructions import Instruction, Load, Offload, Reallocate, Run
from realrl.program.text import name_parameters

if TYPE_CHECKING:
    from realrl.planner.report.report import PlanReport

WIDTH = 1000
"""Width in pixels for which the picture's labels are chosen. A page of another width chooses labels again."""
_HEIGHT = 400
"""Height in pixels of all bands together, if there are many devices and every band is high enough for a label."""
_DEVICE, _BAND = 56, 24
"""Pixels: maximum height of one device, and minimum height of one band."""
_LINE, _LETTER, _MARGIN = 15, 6.7, 8
"""Height of a line of text, width of a letter, and width of a label's margins, in pixels."""


@cache
def find_template(name: str) -> Template:
    """Find a page's template by the name of its file. Inserted values are escaped."""
    loader = PackageLoader("realrl.cli.page", "templates")
    return Environment(
        loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    ).get_template(name)


@dataclass(frozen=True)
class Label:
    """One way to label a box."""

    lines: tuple[str, ...]
    upwards: bool = False
    """Whether the label is written from bottom to top."""

    @property
    def size(self) -> tuple[float, float]:
        """Width and height in pixels."""
        length = _LETTER * max(map(len, self.lines)) + _MARGIN
        breadth = _LINE * len(self.lines) + 2
        return (breadth, length) if self.upwards else (length, breadth)

    def offset(self, line: int) -> float:
        """Return the pixels from the middle of the box to the baseline of the line with this number."""
        return (line - (len(self.lines) - 1) / 2) * _LINE + 4


@dataclass(frozen=True, kw_only=True)
class DrawnBox:
    """Box of the picture. `x` and `width` are in percent, `y` and `height` in pixels."""

    x: float
    width: float
    y: float
    height: float
    look: str
    """CSS classes."""
    call: str
    """Call of the box; empty for none."""
    labels: tuple[Label, ...]
    """Labels from the most detailed to the shortest."""
    tip: str

    @property
    def chosen(self) -> Label | None:
        """The most detailed label that fits into this box at the picture's usual width, or None."""
        for label in self.labels:
            width, height = label.size
            if width <= self.width / 100 * WIDTH and height <= self.height:
                return label
        return None


@dataclass(frozen=True)
class DrawnBand:
    """Band of the picture, in pixels."""

    y: float
    height: float
    name: str
    detail: str


@dataclass(frozen=True)
class Tick:
    """Tick of the time axis. `x` is in percent."""

    x: float
    text: str
    level: int
    """0 for a tick that is always shown. Higher levels need an enlarged picture."""


@dataclass(frozen=True)
class TimelineDrawing:
    """Bands, borders, boxes and ticks of the picture, and its height in pixels."""

    height: float
    rows: tuple[DrawnBand, ...]
    borders: tuple[float, ...]
    """Pixels from the top of the picture to each border between two nodes."""
    boxes: tuple[DrawnBox, ...]
    ticks: tuple[Tick, ...]


def draw_timeline(report: "PlanReport") -> TimelineDrawing:
    """Draw the predicted step of a plan."""
    estimate = report.chosen
    spec = report.scenario.spec
    bands = find_bands(estimate, spec)
    heights = _heights(bands)
    tops = [0.0, *accumulate(heights)]
    rows = tuple(
        DrawnBand(y, height, *_names(band, spec))
        for band, y, height in zip(bands, tops, heights, strict=False)
    )
    boxes = []
    for area in find_areas(bands, estimate.step_seconds):
        y = tops[area.bands.start]
        devices = sum(len(bands[i].ranks) for i in area.bands)
        boxes.append(_area_box(area, devices, y, tops[area.bands.stop] - y, report))
    functions = [call for call in estimate.calls.values() if call.call.is_function]
    for number, of in enumerate(functions):
        y = tops[-1] + _BAND * number
        rows += (DrawnBand(y, _BAND, f"host: {of.call.name}", ""),)
        boxes.append(_function_box(of, y, report))
    return TimelineDrawing(
        tops[-1] + _BAND * len(functions),
        rows,
        tuple(_borders(bands, tops, heights, spec)),
        tuple(boxes),
        tuple(list_ticks(estimate.step_seconds)),
    )


def _heights(bands: Sequence[Band]) -> list[float]:
    """Compute heights in proportion to the numbers of devices, but high enough for a label."""
    device = min(_DEVICE, _HEIGHT / sum(len(band.ranks) for band in bands))
    least = min(_BAND, 2 * _HEIGHT / len(bands))
    return [max(least, device * len(band.ranks)) for band in bands]


def _names(band: Band, spec: ClusterSpec) -> tuple[str, str]:
    nodes = sorted({spec.cluster.node(rank) for rank in (band.ranks[0], band.ranks[-1])})
    name = f"device{'s' if len(band.ranks) > 1 else ''} {format_interval(band.ranks)}"
    kind = f" · {spec.device(band.ranks[0]).name}" if len(spec.groups) > 1 else ""
    return name, f"node{'s' if len(nodes) > 1 else ''} {format_interval(nodes)}{kind}"


def _borders(
    bands: Sequence[Band], tops: Sequence[float], heights: Sequence[float], spec: ClusterSpec
) -> Iterator[float]:
    """List the borders between nodes, unless they lie too close together."""
    for band, top, height in zip(bands, tops, heights, strict=False):
        device = height / len(band.ranks)
        starts = [
            rank for rank in band.ranks if rank and spec.cluster.node(rank) != spec.cluster.node(rank - 1)
        ]
        if device * len(band.ranks) / max(1, len(starts)) >= 4:
            yield from (top + device * (rank - band.ranks[0]) for rank in starts)


def _area_box(area: Area, devices: int, y: float, height: float, report: "PlanReport") -> DrawnBox:
    block, step = area.block, report.chosen.step_seconds
    look, call, labels = describe_instruction(
        block.instruction,
        format_seconds(block.end - block.start),
        lambda role: find_role_class(report, role),
        lambda call: report.scenario.graph.call(call).kind,
    )
    return DrawnBox(
        x=100 * block.start / step,
        width=100 * (block.end - block.start) / step,
        y=y,
        height=height,
        look=look,
        call=call,
        labels=labels,
        tip=f"{_describe_block(report.chosen, block)}\non\t{format_count_of(devices, 'device')}",
    )


def _function_box(of: CallEstimate, y: float, report: "PlanReport") -> DrawnBox:
    """Draw a function below the devices, from its start on the first rank to its end on the last one."""
    step, name = report.chosen.step_seconds, of.call.name
    starts = [
        s.start
        for rank in report.chosen.slices
        for s in rank
        if s.host and isinstance(s.instruction, Run) and s.instruction.call == name
    ]
    start = min(starts, default=of.start)
    return DrawnBox(
        x=100 * start / step,
        width=100 * (of.end - start) / step,
        y=y,
        height=_BAND,
        look="function",
        call=name,
        labels=(Label((f"{name} · {format_seconds(of.seconds)}",)), Label((name,))),
        tip=_describe_call(report.chosen, name),
    )


def describe_instruction(
    instruction: Instruction | None, seconds: str, colour: Callable[[str], str], kind: Callable[[str], str]
) -> tuple[str, str, tuple[Label, ...]]:
    """Return the CSS classes of an instruction's box, its call and its labels. None stands for waiting.

    `colour` maps a role to its CSS class, and `kind` a call to its kind.
    """
    match instruction:
        case Run(call, None, _):
            return "function", call, (Label((f"{call} · {seconds}",)), Label((call,)))
        case Run(call, str(role), placement):
            labels = tuple(_list_labels(call, role, format_strategy(placement), seconds))
            return f"{colour(role)} {kind(call)}", call, labels
        case Reallocate(role, into=into):
            return f"{colour(into or role)} move", "", ()
        case Load(role) | Offload(role):
            return f"{colour(role)} host", "", ()
    return "wait", "", ()


def _describe_block(estimate: Estimate, block: Block) -> str:
    """Describe the activity of devices in a block, and its duration, as a tooltip."""
    facts = [
        ("takes", format_seconds(block.end - block.start)),
        ("from", f"{block.start:.2f} s"),
        ("to", f"{block.end:.2f} s"),
    ]
    match block.instruction:
        case Run(call):
            return _describe_call(estimate, call)
        case Reallocate() as move:
            return _describe_move(estimate, move, facts)
        case Load(role, _, what, name) | Offload(role, _, what, name):
            verb = "comes from" if isinstance(block.instruction, Load) else "goes to"
            return make_tip(f"{what} of {name_parameters(role, name)} {verb} host memory", facts)
    return make_tip(block.reason.capitalize(), facts)


def _describe_call(estimate: Estimate, name: str) -> str:
    call = estimate.calls[name]
    placement = call.placement
    facts = [
        ("takes", format_seconds(call.seconds) if call.terms else "not measured, counted as 0 s"),
        ("mesh", f"devices {format_interval(placement.ranks)}"),
        ("strategy", format_strategy(placement)),
    ]
    if call.call.function is not None:
        facts.append(("function", f"{call.call.function}, on the host"))
    else:
        micro_batch = f"{placement.strategy.micro_batch_tokens:,} tokens"
        facts += [("micro-batch", micro_batch), ("with", format_extras(placement))]
    terms = sorted(call.terms.items(), key=lambda item: -item[1])
    shares = [(term, f"{format_seconds(s)} · {format_share(s / call.seconds)}") for term, s in terms if s > 0]
    return make_tip(name, [*facts, *shares])


def _describe_move(estimate: Estimate, move: Reallocate, facts: list[tuple[str, str]]) -> str:
    role = name_parameters(move.role, move.parameter_set)
    title = f"{role} is reallocated" if move.into is None else f"{role} is mixed into {move.into}"
    facts = [("old layout", move.source.layout), ("new layout", move.target.layout), *facts]
    found = next((m for m in estimate.moves if m.instruction == move), None)
    if found is not None:
        facts.append(("sent", format_bytes(found.sent_bytes)))
        facts.append(("between nodes", format_bytes(found.network_bytes)))
    return make_tip(title, facts)


def _list_labels(call: str, role: str, degrees: str, seconds: str) -> Iterator[Label]:
    words = tuple(call.split("."))
    yield Label((call, f"{degrees} · {seconds}"))
    yield from (Label(lines) for lines in ((call, seconds), (*words, seconds), (call,)))
    yield Label((f"{call} · {seconds}",), upwards=True)
    yield Label(words)
    yield from (Label(lines, upwards=True) for lines in ((call,), words))
    yield from (Label((role,), upwards) for upwards in (False, True))


def list_ticks(seconds: float) -> Iterator[Tick]:
    """List round times: about ten at level 0. Each further level divides an interval into five."""
    size: float = 10 ** floor(log10(seconds))
    first = next(size * f for f in (0.1, 0.2, 0.5, 1, 2, 5) if seconds / (size * f) <= 10)
    shown: set[float] = set()
    for level, spacing in enumerate((first, first / 5, first / 25)):
        for number in range(int(seconds / spacing) + 1):
            time = round(number * spacing, 9)
            if time not in shown:
                shown.add(time)
                yield Tick(100 * time / seconds, f"{time:g}", level)
