"""Picture of a step: devices from top to bottom, time from left to right."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import floor, log10
from typing import TYPE_CHECKING

from realrl.cli.page.bands import Area, Band, find_areas, find_bands
from realrl.cli.page.text import format_count_of, format_interval, format_seconds, format_strategy
from realrl.cli.page.tips import describe_block, describe_call, find_role_class
from realrl.planner.cluster.cluster_spec import ClusterSpec
from realrl.planner.simulate.estimate import CallEstimate
from realrl.program.instructions import Load, Offload, Reallocate, Run

if TYPE_CHECKING:
    from realrl.planner.report.report import PlanReport

WIDTH = 1000
"""Pixels for which the labels of the picture are chosen; a page of another width chooses anew."""
_HEIGHT = 400
"""Pixels of all bands where none is too thin for a label and devices are many."""
_DEVICE, _BAND = 56, 24
"""Pixels: maximum height of one device, and minimum height of one band."""
_LINE, _LETTER = 15, 6.7
"""Pixels of a line of text, and of a letter."""
_MARGIN = 8


@dataclass(frozen=True)
class Label:
    """One way to label a box."""

    lines: tuple[str, ...]
    upwards: bool = False
    """Whether it is written from bottom to top."""

    @property
    def width(self) -> float:
        """Width in pixels."""
        return self._breadth if self.upwards else self._length

    @property
    def height(self) -> float:
        """Height in pixels."""
        return self._length if self.upwards else self._breadth

    @property
    def _length(self) -> float:
        return _LETTER * max(map(len, self.lines)) + _MARGIN

    @property
    def _breadth(self) -> float:
        return _LINE * len(self.lines) + 2

    def offset(self, line: int) -> float:
        """Pixels from the middle of the box to the base line of a line."""
        return (line - (len(self.lines) - 1) / 2) * _LINE + 4


@dataclass(frozen=True)
class DrawnBox:
    """Area as drawn: percent from left to right, pixels from top to bottom."""

    x: float
    width: float
    y: float
    height: float
    look: str
    """CSS classes."""
    call: str
    """Call it belongs to; empty for none."""
    labels: tuple[Label, ...]
    """Labels from the most detailed to the shortest."""
    tip: str

    @property
    def chosen(self) -> Label | None:
        """The most detailed label that fits into this box at the picture's usual width; None if none does."""
        room = self.width / 100 * WIDTH
        return next((lab for lab in self.labels if lab.width <= room and lab.height <= self.height), None)


@dataclass(frozen=True)
class DrawnBand:
    """Band as drawn."""

    y: float
    height: float
    name: str
    detail: str


@dataclass(frozen=True)
class Tick:
    """Time on the axis."""

    x: float
    text: str
    level: int
    """0 where it is always shown, more where only an enlarged picture has room for it."""


@dataclass(frozen=True)
class TimelineDrawing:
    """Content of the picture."""

    height: float
    rows: tuple[DrawnBand, ...]
    borders: tuple[float, ...]
    """Pixels from the top at which a node ends and the next one begins."""
    boxes: tuple[DrawnBox, ...]
    ticks: tuple[Tick, ...]


def draw_timeline(report: "PlanReport") -> TimelineDrawing:
    """Place everything."""
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
        bottom = tops[area.bands.stop]
        boxes.append(_box(area, sum(len(bands[i].ranks) for i in area.bands), y, bottom - y, report))
    functions = [call for call in estimate.calls.values() if call.call.is_function]
    below = [tops[-1] + _BAND * i for i in range(len(functions))]
    rows += tuple(
        DrawnBand(y, _BAND, f"host: {of.call.name}", "") for of, y in zip(functions, below, strict=True)
    )
    boxes += [_function_box(of, y, report) for of, y in zip(functions, below, strict=True)]
    return TimelineDrawing(
        tops[-1] + _BAND * len(functions),
        rows,
        tuple(_borders(bands, tops, heights, spec)),
        tuple(boxes),
        tuple(list_ticks(estimate.step_seconds)),
    )


def _heights(bands: Sequence[Band]) -> list[float]:
    """Compute heights proportional to numbers of devices, as long as there is room for a label."""
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
    """List the borders between nodes, unless they are too many to tell apart."""
    for band, top, height in zip(bands, tops, heights, strict=False):
        device = height / len(band.ranks)
        starts = [
            rank for rank in band.ranks if rank and spec.cluster.node(rank) != spec.cluster.node(rank - 1)
        ]
        if device * len(band.ranks) / max(1, len(starts)) >= 4:
            yield from (top + device * (rank - band.ranks[0]) for rank in starts)


def _box(area: Area, devices: int, y: float, height: float, report: "PlanReport") -> DrawnBox:
    block = area.block
    step = report.chosen.step_seconds
    look = "wait"
    call = ""
    labels = list[Label]()
    match block.instruction:
        case Run(call, str(role), placement):
            look = f"{find_role_class(report, role)} {report.scenario.graph.call(call).kind}"
            seconds = format_seconds(block.end - block.start)
            labels += list_labels(call, role, format_strategy(placement), seconds)
        case Reallocate(role, into=into):
            look = f"{find_role_class(report, into or role)} move"
        case Load(role) | Offload(role):
            look = f"{find_role_class(report, role)} host"
    x = 100 * block.start / step
    width = 100 * (block.end - block.start) / step
    text = f"{describe_block(report.chosen, block)}\non\t{format_count_of(devices, 'device')}"
    return DrawnBox(
        x=x, width=width, y=y, height=height, look=look, call=call, labels=tuple(labels), tip=text
    )


def _function_box(of: CallEstimate, y: float, report: "PlanReport") -> DrawnBox:
    """Draw a function below the devices, from its start on the first rank to its end on the last one."""
    step, name = report.chosen.step_seconds, of.call.name
    found = [
        s
        for rank in report.chosen.slices
        for s in rank
        if s.host and isinstance(s.instruction, Run) and s.instruction.call == name
    ]
    start = min((s.start for s in found), default=of.start)
    labels = (Label((f"{name} · {format_seconds(of.seconds)}",)), Label((name,)))
    width = 100 * (of.end - start) / step
    return DrawnBox(
        x=100 * start / step,
        width=width,
        y=y,
        height=_BAND,
        look="function",
        call=name,
        labels=labels,
        tip=describe_call(report.chosen, name),
    )


def list_labels(call: str, role: str, degrees: str, seconds: str) -> Iterator[Label]:
    """List the ways to label the box of a call."""
    words = tuple(call.split("."))
    yield Label((call, f"{degrees} · {seconds}"))
    yield from (Label(lines) for lines in ((call, seconds), (*words, seconds), (call,)))
    yield Label((f"{call} · {seconds}",), upwards=True)
    yield Label(words)
    yield from (Label(lines, upwards=True) for lines in ((call,), words))
    yield from (Label((role,), upwards) for upwards in (False, True))


def list_ticks(seconds: float) -> Iterator[Tick]:
    """List round times, at most ten at level 0, and about five between each two at the next level."""
    size: float = 10 ** floor(log10(seconds))
    first = next(size * f for f in (0.1, 0.2, 0.5, 1, 2, 5) if seconds / (size * f) <= 10)
    shown: set[float] = set()
    for level, spacing in enumerate((first, first / 5, first / 25)):
        for number in range(int(seconds / spacing) + 1):
            time = round(number * spacing, 9)
            if time not in shown:
                shown.add(time)
                yield Tick(100 * time / seconds, f"{time:g}", level)
