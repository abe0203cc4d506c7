"""The picture of a step: devices from top to bottom, time from left to right."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import floor, log10
from typing import TYPE_CHECKING

from realrl.cli.page.bands import Area, Band, find_areas, find_bands
from realrl.cli.page.text import count_of, format_seconds, interval, strategy
from realrl.cli.page.tips import block_tip, call_tip, role_class
from realrl.planner.cluster.spec import ClusterSpec
from realrl.planner.simulate.estimate import CallEstimate
from realrl.program.instructions import Load, Offload, Reallocate, Run

if TYPE_CHECKING:
    from realrl.planner.report.report import PlanReport

WIDTH = 1000
"""Pixels for which the labels of the picture are chosen; a page of another width chooses anew."""
_HEIGHT = 400
"""Pixels of all bands where none is too thin for a label and devices are many."""
_DEVICE, _BAND = 56, 24
"""Pixels: one device is at most so high, and one band at least."""
_LINE, _LETTER = 15, 6.7
"""Pixels of a line of text, and of a letter."""
_MARGIN = 8


@dataclass(frozen=True)
class Label:
    """One way to write on a box."""

    lines: tuple[str, ...]
    upwards: bool = False
    """Whether it is written from bottom to top."""

    @property
    def width(self) -> float:
        """Pixels that it needs."""
        return self._breadth if self.upwards else self._length

    @property
    def height(self) -> float:
        """Pixels that it needs."""
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
class Box:
    """An area as drawn: percent from left to right, pixels from top to bottom."""

    x: float
    width: float
    y: float
    height: float
    look: str
    """CSS classes."""
    call: str
    """The call it belongs to; empty for none."""
    labels: tuple[Label, ...]
    """From the one that says most to the shortest."""
    tip: str

    @property
    def chosen(self) -> Label | None:
        """The label that fits into a picture of the usual width."""
        room = self.width / 100 * WIDTH
        return next((lab for lab in self.labels if lab.width <= room and lab.height <= self.height), None)


@dataclass(frozen=True)
class Row:
    """A band as drawn."""

    y: float
    height: float
    name: str
    detail: str


@dataclass(frozen=True)
class Tick:
    """A time on the axis."""

    x: float
    text: str
    level: int
    """0 where it is always shown, more where only an enlarged picture has room for it."""


@dataclass(frozen=True)
class Timeline:
    """All that the picture shows."""

    height: float
    rows: tuple[Row, ...]
    borders: tuple[float, ...]
    """Pixels from the top at which a node ends and the next one begins."""
    boxes: tuple[Box, ...]
    ticks: tuple[Tick, ...]


def draw_timeline(report: "PlanReport") -> Timeline:
    """Place everything."""
    estimate, spec = report.chosen, report.scenario.spec
    bands = find_bands(estimate, spec)
    heights = _heights(bands)
    tops = [0.0, *accumulate(heights)]
    rows = tuple(
        Row(y, height, *_names(band, spec)) for band, y, height in zip(bands, tops, heights, strict=False)
    )
    boxes = []
    for area in find_areas(bands, estimate.step_seconds):
        y, bottom = tops[area.bands.start], tops[area.bands.stop]
        boxes.append(_box(area, sum(len(bands[i].ranks) for i in area.bands), y, bottom - y, report))
    functions = [call for call in estimate.calls.values() if call.call.is_function]
    below = [tops[-1] + _BAND * i for i in range(len(functions))]
    rows += tuple(Row(y, _BAND, f"host: {of.call.name}", "") for of, y in zip(functions, below, strict=True))
    boxes += [_function_box(of, y, report) for of, y in zip(functions, below, strict=True)]
    return Timeline(
        tops[-1] + _BAND * len(functions),
        rows,
        tuple(_borders(bands, tops, heights, spec)),
        tuple(boxes),
        tuple(_ticks(estimate.step_seconds)),
    )


def _heights(bands: Sequence[Band]) -> list[float]:
    """Proportional to numbers of devices, as long as there is room for a label."""
    device = min(_DEVICE, _HEIGHT / sum(len(band.ranks) for band in bands))
    least = min(_BAND, 2 * _HEIGHT / len(bands))
    return [max(least, device * len(band.ranks)) for band in bands]


def _names(band: Band, spec: ClusterSpec) -> tuple[str, str]:
    nodes = sorted({spec.node(rank) for rank in (band.ranks[0], band.ranks[-1])})
    name = f"device{'s' if len(band.ranks) > 1 else ''} {interval(band.ranks)}"
    kind = f" · {spec.device(band.ranks[0]).name}" if len(spec.groups) > 1 else ""
    return name, f"node{'s' if len(nodes) > 1 else ''} {interval(nodes)}{kind}"


def _borders(
    bands: Sequence[Band], tops: Sequence[float], heights: Sequence[float], spec: ClusterSpec
) -> Iterator[float]:
    """Where nodes meet, unless they are too many to tell apart."""
    for band, top, height in zip(bands, tops, heights, strict=False):
        device = height / len(band.ranks)
        starts = [rank for rank in band.ranks if rank and spec.node(rank) != spec.node(rank - 1)]
        if device * len(band.ranks) / max(1, len(starts)) >= 4:
            yield from (top + device * (rank - band.ranks[0]) for rank in starts)


def _box(area: Area, devices: int, y: float, height: float, report: "PlanReport") -> Box:
    block, step = area.block, report.chosen.step_seconds
    look, call, labels = "wait", "", list[Label]()
    match block.instruction:
        case Run(call, str(role), placement):
            look = f"{role_class(report, role)} {report.scenario.graph.call(call).kind}"
            seconds = format_seconds(block.end - block.start)
            labels += _labels(call, role, strategy(placement), seconds)
        case Reallocate(role, into=into):
            look = f"{role_class(report, into or role)} move"
        case Load(role) | Offload(role):
            look = f"{role_class(report, role)} host"
    x, width = 100 * block.start / step, 100 * (block.end - block.start) / step
    text = f"{block_tip(report.chosen, block)}\non\t{count_of(devices, 'device')}"
    return Box(x, width, y, height, look, call, tuple(labels), text)


def _function_box(of: CallEstimate, y: float, report: "PlanReport") -> Box:
    """A function, below the devices, from when the first rank begins with it until the last one has ended it."""
    step, name = report.chosen.step_seconds, of.call.name
    found = [
        s
        for rank in report.chosen.slices
        for s in rank
        if s.host and s.instruction == Run(name, None, of.placement)
    ]
    start = min((s.start for s in found), default=of.start)
    labels = (Label((f"{name} · {format_seconds(of.seconds)}",)), Label((name,)))
    width = 100 * (of.end - start) / step
    return Box(100 * start / step, width, y, _BAND, "function", name, labels, call_tip(report.chosen, name))


def _labels(call: str, role: str, degrees: str, seconds: str) -> Iterator[Label]:
    """Ways to write on the box of a call."""
    words = tuple(call.split("."))
    yield Label((call, f"{degrees} · {seconds}"))
    yield from (Label(lines) for lines in ((call, seconds), (*words, seconds), (call,)))
    yield Label((f"{call} · {seconds}",), upwards=True)
    yield Label(words)
    yield from (Label(lines, upwards=True) for lines in ((call,), words))
    yield from (Label((role,), upwards) for upwards in (False, True))


def _ticks(seconds: float) -> Iterator[Tick]:
    """Round times, at most ten of them at level 0, and five or so between each two at the next level."""
    size: float = 10 ** floor(log10(seconds))
    first = next(size * f for f in (0.1, 0.2, 0.5, 1, 2, 5) if seconds / (size * f) <= 10)
    shown: set[float] = set()
    for level, spacing in enumerate((first, first / 5, first / 25)):
        for number in range(int(seconds / spacing) + 1):
            time = round(number * spacing, 9)
            if time not in shown:
                shown.add(time)
                yield Tick(100 * time / seconds, f"{time:g}", level)
