"""Picture of the last step of a run: measured times above predicted times, on one scale."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from realrl.cli.page.text import format_interval, format_seconds, make_tip
from realrl.cli.page.timeline import (
    DrawnBand,
    DrawnBox,
    TimelineDrawing,
    describe_instruction,
    find_template,
    list_ticks,
)
from realrl.program.instructions import Instruction, Load, Offload, Reallocate, Run
from realrl.program.text import parse_instruction
from realrl.program.trace_file import Event, PredictedStep, find_rank, is_host, read_rank_traces

_RANKS, _ALONE = 64, 8
"""Maximum ranks to read, and maximum ranks with a row each. If there are more, neighbours with equal work share a
row."""
_TRACES = 1 << 25
"""Maximum bytes of traces to read."""
_HEIGHT, _LEAST, _MOST = 420, 18, 40
"""Pixels: height of the whole picture, and the least and the greatest height of a row."""
_EVALUATION = 1 << 40
"""Steps with this number or a higher one are evaluations."""
_NEGLIGIBLE = 2e-4
"""Slices shorter than this fraction of the picture's width are not drawn."""
_COLOURS = 8


LEGEND = (
    ("r7 generate", "generate"),
    ("r7 inference", "inference"),
    ("r7 train", "train"),
    ("function", "function on the host"),
    ("r7 move", "parameters are reallocated"),
    ("r7 host", "copied from or to host memory"),
    ("wait", "waits for others, or exchanges data"),
)
"""CSS classes of boxes, and what they mean."""


@dataclass(frozen=True)
class DrawnStep:
    """Picture of the last step of a run. Times are in seconds."""

    step: int
    """Number of the step, from 1 on."""
    ranks: int
    """Number of ranks in the picture."""
    seconds: float
    predicted_seconds: float | None
    """Predicted duration of a single step; None without a prediction."""
    drawing: TimelineDrawing


@dataclass(frozen=True)
class _Row:
    """A row of the picture: the trace slices of one rank, which stand for all ranks of the row."""

    name: str
    detail: str
    slices: Sequence[Event]
    origin: float
    """Seconds at which the picture starts, on the clock of the slices."""


def draw_last_step(run_dir: Path, kinds: Mapping[str, str]) -> dict[str, Any] | None:
    """Draw the step of `find_last_step` as SVG elements, for scripts of a page."""
    found = find_last_step(run_dir, kinds)
    if found is None:
        return None
    template: Any = find_template("timeline.jinja").module
    return {
        "step": found.step,
        "ranks": found.ranks,
        "seconds": found.seconds,
        "predicted_seconds": found.predicted_seconds,
        "height": round(found.drawing.height + template.axis, 1),
        "gutter": str(template.gutter(found.drawing)),
        "plot": str(template.patterns()) + str(template.plot(found.drawing, True)),
    }


def find_last_step(run_dir: Path, kinds: Mapping[str, str]) -> DrawnStep | None:
    """Draw the latest training step for which most ranks have slices; None before the first step.

    `kinds` maps a call to its kind. The kind of other calls is guessed from the end of their names.
    """
    traces = read_rank_traces(run_dir, _RANKS, _TRACES)
    step = _find_step(traces)
    if step is None:
        return None
    measured, predicted = dict[int, list[Event]](), dict[int, list[Event]]()
    for rank, events in traces.items():
        if here := [event for event in events if event["args"].get("step") == step]:
            measured[rank] = here
    found = PredictedStep.load(run_dir)
    for event in (event for rank in found.ranks for event in rank) if found is not None else ():
        if find_rank(event) in measured:
            predicted.setdefault(find_rank(event), []).append(event)
    origin = min(event["ts"] for events in measured.values() for event in events)
    seconds = _end(measured) - origin / 1e6
    expected = _end(predicted) if predicted else None
    rows = list(_list_rows(measured, predicted, origin))
    drawing = _draw(rows, max(seconds, expected or 0.0, 1e-6), kinds)
    return DrawnStep(step + 1, len(measured), seconds, expected, drawing)


def _find_step(traces: Mapping[int, Sequence[Event]]) -> int | None:
    """Find the latest training step for which most ranks have slices.

    A rank writes its slices when it has finished a step, so the last step of one rank may be missing for others.
    """
    counts: dict[int, int] = {}
    for events in traces.values():
        for step in {event["args"].get("step") for event in events}:
            if isinstance(step, int) and 0 <= step < _EVALUATION:
                counts[step] = counts.get(step, 0) + 1
    return max(counts, key=lambda step: (counts[step], step), default=None)


def _list_rows(
    measured: Mapping[int, Sequence[Event]], predicted: Mapping[int, Sequence[Event]], origin: float
) -> Iterator[_Row]:
    def work(rank: int) -> object:
        names = [
            [event["name"] for event in sorted(events, key=lambda event: event["ts"])]
            for events in (measured[rank], predicted.get(rank, ()))
        ]
        return rank if len(measured) <= _ALONE else names

    for _, group in groupby(measured, key=work):
        ranks = list(group)
        name = f"rank{'s' if len(ranks) > 1 else ''} {format_interval(ranks)}"
        for detail, events, start in (
            ("measured", measured[ranks[0]], origin),
            ("predicted", predicted.get(ranks[0], ()), 0.0),
        ):
            for host in (False, True):
                slices = [event for event in events if is_host(event) == host]
                if slices:
                    yield _Row(name + " host" * host, detail, slices, start / 1e6)


def _draw(rows: Sequence[_Row], whole: float, kinds: Mapping[str, str]) -> TimelineDrawing:
    height = float(min(_MOST, max(_LEAST, _HEIGHT / len(rows))))
    colours = _choose_colours(rows)
    bands, boxes, borders = [], [], []
    for number, row in enumerate(rows):
        y = number * height
        first = number == 0 or rows[number - 1].name != row.name
        bands.append(DrawnBand(y, height, row.name if first else row.detail, ""))
        if first and number:
            borders.append(y)
        for event in sorted(row.slices, key=lambda event: event["ts"]):
            box = _box(event, row, whole, colours, kinds, y, height)
            if box is not None:
                boxes.append(box)
    ticks = tuple(tick for tick in list_ticks(whole) if tick.x < 99)  # a text at the end would be cut
    return TimelineDrawing(height * len(rows), tuple(bands), tuple(borders), tuple(boxes), ticks)


def _box(
    event: Event,
    row: _Row,
    whole: float,
    colours: Mapping[str, str],
    kinds: Mapping[str, str],
    y: float,
    height: float,
) -> DrawnBox | None:
    waiting = event["args"].get("waiting")
    start = event["ts"] / 1e6 - row.origin
    end = start + event["dur"] / 1e6
    if isinstance(waiting, int | float) and 0 < waiting < event["dur"] / 1e6:
        start += waiting
    if end - start < _NEGLIGIBLE * whole:
        return None
    seconds = format_seconds(end - start)
    look, call, labels = describe_instruction(
        _parse(event["name"]), seconds, lambda role: colours[role], lambda call: _kind(call, kinds)
    )
    error = str(event["args"].get("error", ""))
    if error:
        look += " failed"
    title = " ".join(event["name"].split())
    facts = [("takes", seconds), ("from", f"{start:.3f} s"), ("to", f"{end:.3f} s")]
    facts += [("on", f"{row.name}, {row.detail}"), ("batch", _name_batches(event)), ("error", error)]
    return DrawnBox(
        x=100 * max(0.0, start) / whole,
        width=100 * (end - start) / whole,
        y=y + 1,
        height=height - 2,
        look=look,
        call=call,
        labels=labels,
        tip=make_tip(title, facts),
    )


def _name_batches(event: Event) -> str:
    """Name the batches on which a slice works, if sampling runs ahead, by the steps that train on them."""
    batches = event["args"].get("batches")
    numbers = batches if isinstance(batches, list) else []
    return " and ".join(str(number + 1) for number in numbers if isinstance(number, int))


def _choose_colours(rows: Sequence[_Row]) -> dict[str, str]:
    roles: dict[str, None] = {}
    for row in rows:
        for event in sorted(row.slices, key=lambda event: event["ts"]):
            match _parse(event["name"]):
                case Run(role=str(role)) | Load(role) | Offload(role):
                    roles[role] = None
                case Reallocate(role, into=into):
                    roles |= dict.fromkeys(name for name in (role, into) if name)
    return {role: f"r{number % _COLOURS}" for number, role in enumerate(roles)}


def _parse(name: str) -> Instruction | None:
    """Read an instruction; None for a slice without one, such as a wait for a function."""
    try:
        return parse_instruction(name)
    except ValueError:
        return None


def _kind(call: str, kinds: Mapping[str, str]) -> str:
    last = call.rpartition(".")[2]
    return kinds.get(call) or next((kind for kind in ("generate", "train") if kind in last), "inference")


def _end(ranks: Mapping[int, Sequence[Event]]) -> float:
    return max((event["ts"] + event["dur"]) / 1e6 for events in ranks.values() for event in events)
