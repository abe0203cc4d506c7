"""Metrics and costs of a run, read from its directory. Does not import torch."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from realrl.cli.page.text import format_share
from realrl.config.errors import UserError
from realrl.config.json_file import parse_rows, read_tail
from realrl.runtime.measure.metric_names import IDLE_RANK, PERFORMANCE

if TYPE_CHECKING:
    from realrl.planner.report.comparison import Comparison

_STEP = ("tokens_per_s", "mfu", "idle", "idle_max")
_WORTH_TELLING = 0.05
"""The rank with the largest idle share is named if its share exceeds the mean by more than this."""


@dataclass(frozen=True)
class MetricLine:
    """Metrics of one training step or one evaluation. A number that is not finite is None."""

    step: int
    kind: str
    metrics: dict[str, float | None]
    seconds: float | None = None
    """Duration of the step or evaluation."""

    @classmethod
    def parse(cls, row: Mapping[str, Any]) -> "MetricLine":
        """Read a line from its JSON form. Raises KeyError if a field is missing."""
        return cls(row["step"], row["kind"], row["metrics"], row.get("seconds"))


@dataclass(frozen=True)
class MetricPart:
    """Lines of a part of metrics.jsonl."""

    lines: tuple[MetricLine, ...]
    offset: int
    """Bytes of the file up to the end of the last of these lines."""
    more: bool
    """Whether the file may have complete lines after these lines."""


def find_metric(names: Mapping[str, object], metric: str) -> str | None:
    """Find a metric by its full name, or by the part after its last slash."""
    return next((name for name in names if name == metric or name.endswith("/" + metric)), None)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read all JSON lines of a file. Raises UserError with the number of an invalid line."""
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            rows.append(json.loads(line))
        except (ValueError, RecursionError):
            raise UserError(f"{path}, line {number}: not valid JSON") from None
    return rows


def read_part(path: Path, offset: int, limit: int, every: int = 1) -> MetricPart:
    """Read the complete lines in `limit` bytes of a growing file after `offset`, but at least one line.

    Invalid lines are skipped. With `every` above 1, only one line in `every` and all evaluations are read. If no
    line ends at `offset`, the file was cut and written again, so reading restarts at its beginning. Raises OSError
    if the file cannot be read.
    """
    with path.open("rb") as file:
        file.seek(max(0, offset - 1))
        if offset and file.read(1) != b"\n":
            offset = file.seek(0)
        text = file.read(limit)
        if len(text) == limit and b"\n" not in text:
            text += file.readline()
    end = text.rfind(b"\n") + 1
    lines = text[:end].splitlines()
    if every > 1:
        lines = [line for i, line in enumerate(lines) if i % every == 0 or b'"eval"' in line]
    return MetricPart(tuple(_parse_lines(lines)), offset + end, len(text) >= limit)


def read_last(path: Path, limit: int) -> tuple[MetricLine, ...]:
    """Read the complete lines in the last `limit` bytes of a file; empty if the file cannot be read."""
    return tuple(_parse_lines(read_tail(path, limit)))


def _parse_lines(texts: Sequence[bytes]) -> list[MetricLine]:
    found = []
    for row in parse_rows(texts):
        with suppress(KeyError):
            line = MetricLine.parse(row)
            if isinstance(line.step, int) and isinstance(line.metrics, dict):
                found.append(line)
    return found


def read_speed(metrics: Mapping[str, object]) -> dict[str, float]:
    """Select the performance metrics of a whole step and the idle shares of its ranks, by name without prefix."""
    found = {}
    for name, value in metrics.items():
        short = name.removeprefix(PERFORMANCE)
        of_step = short in _STEP or short.startswith(IDLE_RANK)
        if short != name and of_step and isinstance(value, int | float) and isfinite(value):
            found[short] = float(value)
    return found


def describe_speed(speed: Mapping[str, float]) -> list[str]:
    """Describe the result of `read_speed`: throughput, MFU, and how idle the ranks were."""
    parts = []
    if "tokens_per_s" in speed:
        parts.append(f"{speed['tokens_per_s']:,.0f} tokens/s")
    if "mfu" in speed:
        parts.append(f"MFU {format_share(speed['mfu'])}")
    if "idle_max" in speed and "idle" in speed:
        most, mean = speed["idle_max"], speed["idle"]
        ranks = [name for name, share in speed.items() if name.startswith(IDLE_RANK) and share == most]
        which = f"rank {ranks[0].removeprefix(IDLE_RANK)}: " if ranks else "at most "
        detail = f" ({which}{format_share(most)})" if most - mean > _WORTH_TELLING else ""
        parts.append(f"idle {format_share(mean)}{detail}")
    return parts


class Cost(NamedTuple):
    """Predicted and measured seconds of a part of a step, and the peak bytes of a call."""

    name: str
    placement: str | None
    predicted_seconds: float | None
    seconds: float
    predicted_bytes: int | None = None
    bytes: int | None = None


def list_costs(comparison: "Comparison") -> list[Cost]:
    """List the costs of each call, of the wait for each function, of reallocations, and of the whole step."""
    found = []
    for of in comparison.calls:
        seconds, sizes = (of.predicted_seconds, of.seconds.median), (of.predicted_bytes, of.bytes)
        found.append(Cost(of.call.name, of.placement, *seconds, *sizes))
        if of.waited is not None:
            found.append(Cost("  wait", None, None, of.waited.median))
    moves = comparison.reallocations
    if moves:
        expected = sum(move.predicted_seconds or 0.0 for move in moves)
        found.append(Cost("reallocations", None, expected, sum(move.seconds.median for move in moves)))
    return [*found, Cost("whole step", None, comparison.predicted_step_seconds, comparison.step.median)]
