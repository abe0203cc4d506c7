"""Lines of metrics.jsonl, whole or as they come."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from realrl.config.errors import UserError
from realrl.config.json_file import parse_rows, read_tail


@dataclass(frozen=True)
class MetricLine:
    """Metrics of one training step, or of one evaluation; None for a number that is not finite."""

    step: int
    kind: str
    metrics: dict[str, float | None]
    seconds: float | None = None
    """Duration of the step or evaluation."""

    @classmethod
    def parse(cls, row: Mapping[str, Any]) -> "MetricLine":
        """Make a line of its JSON form; KeyError where something is missing."""
        return cls(row["step"], row["kind"], row["metrics"], row.get("seconds"))


@dataclass(frozen=True)
class MetricPart:
    """Lines of a part of the file."""

    lines: tuple[MetricLine, ...]
    offset: int
    """Bytes of the file up to the end of the last line."""
    more: bool
    """Whether there are more whole lines."""


def find_metric(names: Mapping[str, object], metric: str) -> str | None:
    """Find a metric by its name, or by what follows its last slash."""
    return next((name for name in names if name == metric or name.endswith("/" + metric)), None)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read all JSON lines of a file; UserError naming the line that is none."""
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            rows.append(json.loads(line))
        except (ValueError, RecursionError):
            raise UserError(f"{path}, line {number}: not valid JSON") from None
    return rows


def read_part(path: Path, offset: int, limit: int, every: int = 1) -> MetricPart:
    """Read the whole lines in `limit` bytes of a file that grows; what is no line of metrics is left out.

    Of training steps only one in `every` is read.

    From the beginning where no line ends at `offset`: the file has been cut and written on. OSError where it cannot
    be read. At least one line is read, however long, if there is a whole one.
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
    """Read the whole lines in the last `limit` bytes of a file; none where it cannot be read."""
    return tuple(_parse_lines(read_tail(path, limit)))


def _parse_lines(texts: Sequence[bytes]) -> list[MetricLine]:
    found = []
    for row in parse_rows(texts):
        with suppress(KeyError):
            line = MetricLine.parse(row)
            if isinstance(line.step, int) and isinstance(line.metrics, dict):
                found.append(line)
    return found
