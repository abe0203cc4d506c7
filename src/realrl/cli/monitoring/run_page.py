"""Page of a run, and the data that it asks for."""

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from realrl import __version__
from realrl.cli.monitoring.run_files import RunFiles
from realrl.cli.monitoring.server import Query, Reply, Route
from realrl.cli.monitoring.status_text import describe_doing
from realrl.cli.monitoring.timeline import draw_last_step
from realrl.cli.page.templating import find_template
from realrl.cli.reporting.metrics import find_metric
from realrl.cli.reporting.status import read_status
from realrl.config.errors import UserError
from realrl.config.json_file import read_json
from realrl.program.trace_file import PREDICTED, TRACE, PredictedStep
from realrl.runtime.output.algorithm_record import RECORD, AlgorithmRecord

_RANKS = 512
"""Ranks that the page lists."""
_NAMES = 64
"""Metrics that are asked for at a time."""


class RunPage:
    """Answers to the requests of a run's page. All of it is read anew from the run's directory."""

    def __init__(self, run_dir: Path) -> None:
        self._files = RunFiles(run_dir)
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
        """Make the page itself, which holds nothing of the run but its name."""
        nonce = secrets.token_urlsafe(16)
        name = self._files.path.resolve().name
        text = find_template("watch.html.jinja").render(name=name, nonce=nonce, version=__version__)
        policy = (
            f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self';"
            " img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        return Reply(text.encode(), "text/html; charset=utf-8", policy=policy)

    def read_run(self, _: Query) -> Reply:
        """Read all but curves, samples and the timeline."""
        path = self._files.path
        status = read_status(path)
        algorithm = self._algorithm()
        predicted = PredictedStep.load(path)
        found = status.to_json()
        found["ranks"] = [
            {**rank, "does": describe_doing(whole)}
            for rank, whole in zip(found["ranks"][:_RANKS], status.ranks, strict=False)
        ]
        return Reply.of_json(
            {
                "status": found,
                "curves": [] if algorithm is None else list(algorithm.curves.items()),
                "sampled": self._files.list_sampled_steps(),
                "checkpoints": self._files.list_checkpoints(),
                "notes": self._files.read_notes(),
                "memory": [] if predicted is None else [vars(device) for device in predicted.memory[:_RANKS]],
                "costs": self._costs(),
                "downloads": [name for name in (TRACE, PREDICTED) if self._files.find(name)],
            }
        )

    def read_metrics(self, query: Query) -> Reply:
        """Read what has come after `offset`: the metrics whose names, separated by commas, are in `names`."""
        names = query.get("names", "").split(",")[:_NAMES]
        part, file = self._files.read_metrics(_whole(query.get("offset")))
        rows = []
        known: dict[str, None] = {}
        for line in part.lines:
            known |= dict.fromkeys(line.metrics)
            found = (find_metric(line.metrics, name) if name else None for name in names)
            values = [None if name is None else line.metrics[name] for name in found]
            rows.append((line.step, line.kind, line.seconds, values))
        content = {"file": file, "offset": part.offset, "more": part.more, "rows": rows, "known": [*known]}
        return Reply.of_json(content)

    def read_samples(self, query: Query) -> Reply:
        """Read the samples of the evaluation after `step` training steps."""
        algorithm = self._algorithm()
        keys = () if algorithm is None else algorithm.sample_keys
        return Reply.of_json(self._files.read_samples(_whole(query.get("step")), keys))

    def read_step(self, _: Query) -> Reply:
        """Draw the timeline of the last step."""
        costs = self._costs()
        calls = [] if costs is None else costs["calls"]
        picture = draw_last_step(self._files.path, {call["name"]: call["kind"] for call in calls})
        return Reply.of_json(None if picture is None else picture.to_html())

    def _download(self, name: str) -> Reply | None:
        content = self._files.read(name)
        return None if content is None else Reply(content, "application/json", file=name)

    def _algorithm(self) -> AlgorithmRecord | None:
        try:
            return None if self._files.find(RECORD) is None else AlgorithmRecord.load(self._files.path)
        except (UserError, OSError):
            return None

    def _costs(self) -> dict[str, Any] | None:
        """Read measured beside predicted costs, without what they are of; None where there are none."""
        file = self._files.find("costs.json")
        try:
            found = {} if file is None else read_json(file)
            calls = [_describe_call(call) for call in found["calls"]]
            moves = [
                (move["seconds"]["median"], move["predicted_seconds"]) for move in found["reallocations"]
            ]
            moved = {
                "name": "reallocations",
                "kind": "move",
                "seconds": sum(seconds for seconds, _ in moves),
                "predicted_seconds": sum(seconds or 0 for _, seconds in moves),
            }
            whole = {
                "name": "whole step",
                "kind": "",
                "seconds": found["step"]["median"],
                "predicted_seconds": found["predicted_step_seconds"],
            }
            return {
                "calls": calls,
                "rest": [moved, whole] if moves else [whole],
                "steps": found["step"]["steps"],
            }
        except (UserError, KeyError, TypeError, AttributeError):
            return None


def _describe_call(call: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "name": str(call["call"]["name"]),
        "kind": str(call["call"]["kind"]),
        "placement": str(call["placement"]),
        "seconds": call["seconds"]["median"],
        "predicted_seconds": call["predicted_seconds"],
        "bytes": call["bytes"],
        "predicted_bytes": call["predicted_bytes"],
    }


def _whole(text: str | None) -> int:
    """Read a number that is not negative; 0 where there is none."""
    return int(text) if text and text.isascii() and text.isdecimal() and len(text) < 16 else 0
