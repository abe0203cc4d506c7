"""Page of a run, and the data that the page requests.

Replies are bounded in size, and contain only data from the run's directory.
"""

import secrets
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from realrl import __version__
from realrl.checkpoint.saved import BEST, METRICS, list_checkpoints
from realrl.cli.monitoring.metrics import MetricPart, find_metric, list_costs, read_part
from realrl.cli.monitoring.server import Query, Reply, Route
from realrl.cli.monitoring.status import describe_activity, describe_batches, read_algorithm, read_status
from realrl.cli.monitoring.timeline import LEGEND, draw_last_step
from realrl.cli.page.timeline import find_template
from realrl.cli.page.trajectory import FAILED, NUMBERS, SAMPLED, WRITTEN, has_failed, read_parts
from realrl.config.errors import UserError
from realrl.config.json_file import parse_rows, read_tail
from realrl.planner.report.comparison import COSTS, Comparison
from realrl.program.trace_file import PREDICTED, TRACE, PredictedStep
from realrl.runtime.supervision.run_end import NOTES

_RANKS, _NAMES = 512, 64
"""Maximum ranks on the page, and metrics per request."""
_LINES, _WHOLE = 1 << 20, 1 << 22
"""Bytes of metrics.jsonl read per request, and the size of the file above which lines are left out."""
_NOTES, _ROWS, _LETTERS, _LARGEST = 200, 64, 4000, 1 << 26
"""Maximum number of notes, rows of a list, letters of a text, and bytes of a file to download."""
_LONGEST, _STEPS = 1 << 20, 1000
"""Maximum bytes of a line, and number of evaluations whose samples can be chosen."""


class RunPage:
    """Replies to the requests of a run's page. Each reply reads the run's directory again."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir
        self._inside = run_dir.resolve()
        self.routes: dict[str, Route] = {
            "/": self.make_page,
            "/api/run": self.read_run,
            "/api/metrics": self.read_metrics,
            "/api/samples": self.read_samples,
            "/api/step": self.read_step,
            f"/{TRACE}": lambda _: self._download(TRACE),
            f"/{PREDICTED}": lambda _: self._download(PREDICTED),
        }

    def make_page(self, _: Query) -> Reply:
        """Make the page itself. It contains the run's name, and requests all other data."""
        nonce = secrets.token_urlsafe(16)
        text = find_template("watch.html.jinja").render(
            name=self._inside.name,
            nonce=nonce,
            version=__version__,
            legend=LEGEND,
            sampled=SAMPLED,
            written=WRITTEN,
        )
        policy = (
            f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self';"
            " img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        return Reply(text.encode(), "text/html; charset=utf-8", policy=policy)

    def read_run(self, _: Query) -> Reply:
        """Read all data of the page except curves, samples and the timeline."""
        status = read_status(self.path)
        algorithm = read_algorithm(self.path)
        predicted = PredictedStep.load(self.path)
        costs = self._load_costs()
        found = status.to_json()
        found["ranks"] = [
            {**rank, "does": describe_activity(whole)}
            for rank, whole in zip(found["ranks"][:_RANKS], status.ranks, strict=False)
        ]
        found["batches"] = [batch._asdict() for batch in describe_batches(status)]
        return Reply.of_json(
            {
                "status": found,
                "curves": [] if algorithm is None else list(algorithm.curves.items()),
                "sampled": self._list_sampled_steps(),
                "checkpoints": self._list_checkpoints(),
                "notes": self._read_notes(),
                "memory": [] if predicted is None else [vars(device) for device in predicted.memory[:_RANKS]],
                "costs": [] if costs is None else [cost._asdict() for cost in list_costs(costs)],
                "measured_steps": 0 if costs is None else costs.step.steps,
                "downloads": [name for name in (TRACE, PREDICTED) if self._find(name)],
            }
        )

    def read_metrics(self, query: Query) -> Reply:
        """Read the metrics after `offset` bytes whose names, separated by commas, are in `names`.

        The reply's `file` changes if the metrics file was replaced by another one. If the file has become shorter,
        reading starts again at its beginning.
        """
        names = query.get("names", "").split(",")[:_NAMES]
        offset, file = _whole(query.get("offset")), self._find(METRICS)
        part, identity = MetricPart((), 0, False), ""
        if file is not None:
            status = file.stat()
            start = offset if offset <= status.st_size else 0
            # A curve of a long run leaves out steps, because reading all of them would take too long.
            every = 1 + (status.st_size - start) // _WHOLE
            part, identity = read_part(file, start, _LINES * min(every, 16), every), f"{status.st_ino}"
        rows, known = [], dict[str, None]()
        for line in part.lines:
            known |= dict.fromkeys(line.metrics)
            found = (find_metric(line.metrics, name) if name else None for name in names)
            values = [None if name is None else line.metrics[name] for name in found]
            rows.append((line.step, line.kind, line.seconds, values))
        content = {
            "file": identity,
            "offset": part.offset,
            "more": part.more,
            "rows": rows,
            "known": [*known],
        }
        return Reply.of_json(content)

    def read_samples(self, query: Query) -> Reply:
        """Read the first samples of the evaluation after `step` training steps."""
        algorithm = read_algorithm(self.path)
        keys = (*(() if algorithm is None else algorithm.sample_keys), "judge", *NUMBERS)
        found = []
        file = self._find(f"samples/step-{_whole(query.get('step')):06}.jsonl")
        for row in () if file is None else _read_first_rows(file):
            numbers = {key: row[key] for key in keys if isinstance(row.get(key), int | float)}
            prompt, completion = _cut(row.get("prompt")), _cut(row.get("completion"))
            sample: dict[str, Any] = {"prompt": prompt, "completion": completion, "numbers": numbers}
            parts = read_parts(row)
            if parts is not None:
                sample["parts"] = [vars(part) | {"text": _cut(part.text)} for part in parts[:_ROWS]]
                sample["left_out"] = len(parts[_ROWS:])
                sample["failed"] = FAILED if has_failed(row) else ""
            found.append(sample)
        return Reply.of_json(found)

    def read_step(self, _: Query) -> Reply:
        """Draw the timeline of the last step."""
        costs = self._load_costs()
        kinds = {} if costs is None else {of.call.name: str(of.call.kind) for of in costs.calls}
        return Reply.of_json(draw_last_step(self.path, kinds))

    def _find(self, name: str) -> Path | None:
        """Find a file of the run; None if it is missing, or a link leads out of the directory."""
        file = self.path / name
        try:
            found = file.resolve()
            return file if found.is_file() and found.is_relative_to(self._inside) else None
        except OSError:
            return None

    def _download(self, name: str) -> Reply | None:
        file = self._find(name)
        if file is None or file.stat().st_size > _LARGEST:
            return None
        return Reply(file.read_bytes(), "application/json", file=name)

    def _list_sampled_steps(self) -> list[int]:
        """List the last steps with samples, in order."""
        names = [file.name for file in (self.path / "samples").glob("step-*.jsonl")]
        return sorted(int(name[5:-6]) for name in names if name[5:-6].isdecimal())[-_STEPS:]

    def _read_notes(self) -> list[dict[str, Any]]:
        file = self._find(NOTES)
        rows = [] if file is None else list(parse_rows(read_tail(file, _LONGEST)))[-_NOTES:]
        return [
            {
                "time": time if isinstance(time := row.get("time"), int | float) else 0.0,
                "text": _cut(row.get("text")),
            }
            for row in rows
        ]

    def _list_checkpoints(self) -> list[dict[str, Any]]:
        """List checkpoints and saved models, latest first."""
        saved = [path for name in (BEST, "final") for path in self.path.glob(f"{name}*")]
        found = []
        for folder in [*list_checkpoints(self.path).values(), *saved]:
            try:
                if folder.is_dir():
                    found.append({"name": str(folder.relative_to(self.path)), "time": folder.stat().st_mtime})
            except OSError:
                continue
        return sorted(found, key=lambda entry: (entry["time"], entry["name"]), reverse=True)[:_ROWS]

    def _load_costs(self) -> Comparison | None:
        try:
            return None if self._find(COSTS) is None else Comparison.load(self.path)
        except (UserError, OSError):
            return None


def _read_first_rows(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects in the first lines of a file; lines without an object are left out."""
    with file.open("rb") as lines:
        yield from parse_rows(islice(iter(lambda: lines.readline(_LONGEST), b""), _ROWS))


def _cut(text: Any) -> str:
    text = text if isinstance(text, str) else ""
    return text if len(text) <= _LETTERS else f"{text[:_LETTERS]} …"


def _whole(text: str | None) -> int:
    """Read a whole number from a query; 0 if it is missing or malformed."""
    return int(text) if text and text.isascii() and text.isdecimal() and len(text) < 16 else 0
