"""Files of a run's directory, as far as its page shows them: bounded, and never from elsewhere."""

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from realrl.checkpoint.saved import BEST, METRICS, list_checkpoints
from realrl.cli.reporting.metrics import MetricPart, read_part
from realrl.config.json_file import parse_rows, read_tail
from realrl.runtime.supervision.run_end import NOTES

_LINES, _WHOLE = 1 << 20, 1 << 22
"""Bytes of metrics that are read at a time, and up to which all lines are read."""
_NOTES, _ROWS, _LETTERS, _LARGEST = 200, 64, 4000, 1 << 26
"""Maximum notes, samples of an evaluation, letters of a text, and bytes of a file that is sent as it is."""
_LONGEST, _STEPS = 1 << 20, 1000
"""Maximum bytes of a line, and evaluations whose samples can be chosen."""


class RunFiles:
    """Reader of the files of one run."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir
        self._inside = run_dir.resolve()

    def find(self, name: str) -> Path | None:
        """Find a file of the run; None where there is none, or where a link leads out of the directory."""
        file = self.path / name
        try:
            found = file.resolve()
            return file if found.is_file() and found.is_relative_to(self._inside) else None
        except OSError:
            return None

    def read(self, name: str) -> bytes | None:
        """Read a file of the run; None where there is none, or one that is too large to be sent."""
        file = self.find(name)
        if file is None or file.stat().st_size > _LARGEST:
            return None
        return file.read_bytes()

    def read_metrics(self, offset: int) -> tuple[MetricPart, str]:
        """Read the next metrics after `offset` bytes, and a text that is another one where the file is another one.

        From the beginning where the file has become shorter.
        """
        file = self.find(METRICS)
        if file is None:
            return MetricPart((), 0, False), ""
        status = file.stat()
        start = offset if offset <= status.st_size else 0
        # Curves of long runs have fewer points than steps; reading all of them would take a while.
        every = 1 + (status.st_size - start) // _WHOLE
        return read_part(file, start, _LINES * min(every, 16), every), f"{status.st_ino}"

    def list_sampled_steps(self) -> list[int]:
        """List the last steps after which there are samples, in order."""
        names = [file.name for file in (self.path / "samples").glob("step-*.jsonl")]
        return sorted(int(name[5:-6]) for name in names if name[5:-6].isdecimal())[-_STEPS:]

    def read_samples(self, step: int, keys: Sequence[str]) -> list[dict[str, Any]]:
        """Read the first samples of the evaluation after a step: prompt, completion, and numbers by key."""
        found = []
        for row in self._rows(f"samples/step-{step:06}.jsonl", _ROWS):
            numbers = {key: row[key] for key in (*keys, "judge") if isinstance(row.get(key), int | float)}
            texts = (_cut(row.get("prompt")), _cut(row.get("completion")))
            found.append({"prompt": texts[0], "completion": texts[1], "numbers": numbers})
        return found

    def read_notes(self) -> list[dict[str, Any]]:
        """Read the last notes: `time` and `text`."""
        file = self.find(NOTES)
        rows = [] if file is None else list(parse_rows(read_tail(file, _LONGEST)))[-_NOTES:]
        return [{"time": _number(row.get("time")), "text": _cut(row.get("text"))} for row in rows]

    def list_checkpoints(self) -> list[dict[str, Any]]:
        """List what was saved, latest first: `name` and `time`."""
        saved = [path for name in (BEST, "final") for path in self.path.glob(f"{name}*")]
        folders = [*list_checkpoints(self.path).values(), *saved]
        found = []
        for folder in folders:
            try:
                if folder.is_dir():
                    found.append({"name": str(folder.relative_to(self.path)), "time": folder.stat().st_mtime})
            except OSError:
                continue
        return sorted(found, key=lambda entry: (entry["time"], entry["name"]), reverse=True)[:_ROWS]

    def _rows(self, name: str, most: int) -> Iterator[dict[str, Any]]:
        """Yield the objects of the first lines of a file; lines that have none are left out."""
        file = self.find(name)
        if file is None:
            return
        with file.open("rb") as lines:
            yield from parse_rows(islice(iter(lambda: lines.readline(_LONGEST), b""), most))


def _cut(text: Any) -> str:
    text = text if isinstance(text, str) else ""
    return text if len(text) <= _LETTERS else f"{text[:_LETTERS]} …"


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
