"""Results of a training run, read from its directory."""

import html
import json
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from realrl.checkpoint.saved import CONFIG, METRICS, SUMMARY, checkpoint_path
from realrl.config.errors import UserError
from realrl.config.paths import local_path

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from realrl.plan.plan import Plan
    from realrl.planner.report.comparison import Comparison


class Run:
    """A training run in a directory, finished or not. Everything is read when it is asked for."""

    def __init__(self, path: str | Path) -> None:
        """Open the run in a directory. Raises UserError if there is none."""
        self.path = local_path(str(path))
        """Directory of the run."""
        if not (self.path / CONFIG).is_file():
            raise UserError(f"{path} is not the directory of a run")

    @property
    def finished(self) -> bool:
        """Whether the last training step is done."""
        return (self.path / SUMMARY).is_file()

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """A record per training step and evaluation: `step`, `kind` (`train` or `eval`), `seconds`, and metrics.

        Metrics have names such as `actor.train/loss`. A number that was not finite is None.
        """
        from realrl.cli.monitoring.metrics import read_rows

        file = self.path / METRICS
        rows = read_rows(file) if file.is_file() else []
        return [
            {"step": row["step"], "kind": row["kind"], "seconds": row.get("seconds"), **row["metrics"]}
            for row in rows
        ]

    @property
    def frame(self) -> Any:
        """The metrics as a pandas DataFrame. Raises UserError without pandas."""
        try:
            import pandas
        except ImportError:
            raise UserError(
                "run.frame needs pandas: pip install pandas; run.metrics has the records"
            ) from None
        return pandas.DataFrame(self.metrics)

    @property
    def samples(self) -> list[dict[str, Any]]:
        """The shown answers of the last evaluation: `prompt`, `completion`, and scores."""
        from realrl.cli.monitoring.metrics import read_rows

        files = sorted((self.path / "samples").glob("step-*.jsonl"))
        return read_rows(files[-1]) if files else []

    @property
    def model(self) -> Path:
        """Hugging Face directory of the final model. Raises UserError if the run has not saved it."""
        final = checkpoint_path(self.path, None)
        if not final.is_dir():
            raise UserError(
                f"{self.path} has no final model yet; `realrl export {self.path} --out DIR` writes the models of"
                " its last checkpoint"
            )
        return final

    @property
    def recipe(self) -> str:
        """The resolved recipe as YAML, without secrets."""
        return (self.path / CONFIG).read_text(encoding="utf-8")

    @property
    def plan(self) -> "Plan":
        """The execution plan."""
        from realrl.plan.plan import Plan
        from realrl.recipe.load import load_experiment

        return Plan.load(str(self.path / "plan.yaml"), load_experiment(str(self.path / CONFIG)).graph)

    @cached_property
    def costs(self) -> "Comparison | None":
        """Measured and predicted seconds and bytes of each call; None before the run has compared them."""
        from realrl.planner.report.comparison import COSTS, Comparison

        return Comparison.load(self.path) if (self.path / COSTS).is_file() else None

    @property
    def measured(self) -> float | None:
        """Median measured seconds of a training step; None before they are compared."""
        return None if self.costs is None or self.costs.step is None else self.costs.step.median

    @property
    def predicted(self) -> float | None:
        """Predicted seconds of a training step; None before they are compared, or without a prediction."""
        return None if self.costs is None else self.costs.predicted_step_seconds

    def plot(self) -> "Figure":
        """Draw the curves of the run. Raises UserError without matplotlib."""
        from realrl.cli.report import make_figure, read_run

        run = read_run(str(self.path))
        return make_figure({run.algorithm.name: run})

    def __repr__(self) -> str:
        steps = [row["step"] for row in self.metrics if row["kind"] == "train"]
        state = "finished" if self.finished else "unfinished"
        return f"Run({str(self.path)!r}, {max(steps, default=0)} steps, {state})"

    def _repr_html_(self) -> str:
        """Show the run in a notebook: its directory, state, last metrics and samples."""
        train = [row for row in self.metrics if row["kind"] == "train"]
        last = train[-1] if train else {}
        rows = "".join(_row(name, value) for name, value in last.items() if name not in ("kind", "seconds"))
        shown = "".join(
            f"<li><b>{html.escape(_text(sample.get('prompt')))}</b>"
            f" {html.escape(_text(sample.get('completion')))}</li>"
            for sample in self.samples[:3]
        )
        return f"<p><code>{html.escape(repr(self))}</code></p><table>{rows}</table><ul>{shown}</ul>"


def _row(name: str, value: Any) -> str:
    shown = f"{value:.4g}" if isinstance(value, float) else str(value)
    return f"<tr><td>{html.escape(name)}</td><td>{html.escape(shown)}</td></tr>"


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 200 else f"{text[:200]}…"
