"""Results of a training run, read from its directory."""

import json
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from realrl.api.errors import plain_errors
from realrl.checkpoint.saved import CONFIG, METRICS, SUMMARY, find_final_model
from realrl.config.errors import UserError
from realrl.config.paths import local_path

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from realrl.cli.monitoring.metrics import Cost
    from realrl.plan.plan import Plan
    from realrl.planner.report.comparison import Comparison


class Run:
    """A training run in a directory, finished or not. Everything is read when it is asked for."""

    @plain_errors
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
    @plain_errors
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
    @plain_errors
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
    @plain_errors
    def samples(self) -> list[dict[str, Any]]:
        """The shown answers of the last evaluation: `prompt`, `completion` and scores. With an environment, also
        `trajectory` and its numbers."""
        from realrl.cli.monitoring.metrics import read_rows

        files = sorted((self.path / "samples").glob("step-*.jsonl"))
        return read_rows(files[-1]) if files else []

    @property
    @plain_errors
    def model(self) -> Path:
        """Hugging Face directory of the final model. Raises UserError if the run has not saved it."""
        return Path(find_final_model(str(self.path)))

    @property
    def recipe(self) -> str:
        """The resolved recipe as YAML, without secrets."""
        return (self.path / CONFIG).read_text(encoding="utf-8")

    @property
    @plain_errors
    def plan(self) -> "Plan":
        """The execution plan."""
        from realrl.plan.plan import Plan
        from realrl.recipe.load import load_experiment

        return Plan.load(str(self.path / "plan.yaml"), load_experiment(str(self.path / CONFIG)).graph)

    @cached_property
    @plain_errors
    def costs(self) -> "Comparison | None":
        """Measured and predicted seconds and bytes of each call; None before the run has compared them."""
        from realrl.planner.report.comparison import COSTS, Comparison

        return Comparison.load(self.path) if (self.path / COSTS).is_file() else None

    @property
    @plain_errors
    def measured(self) -> float | None:
        """Median measured seconds of a training step; None before they are compared."""
        return None if self.costs is None or self.costs.step is None else self.costs.step.median

    @property
    @plain_errors
    def predicted(self) -> float | None:
        """Predicted seconds of a training step; None before they are compared, or without a prediction."""
        return None if self.costs is None else self.costs.predicted_step_seconds

    @plain_errors
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
        """Show the run in a notebook: last metrics, timeline of the last step, costs of its calls, and samples."""
        from realrl.cli.monitoring.metrics import list_costs
        from realrl.cli.monitoring.timeline import LEGEND, find_last_step
        from realrl.cli.page.text import format_seconds
        from realrl.cli.page.timeline import find_template

        try:
            costs, note = (
                self.costs,
                "Costs are compared at the first evaluation, checkpoint or end of the run.",
            )
        except UserError as error:
            costs, note = None, str(error)
        if costs is not None:
            note = _describe_medians(costs)
        kinds = {} if costs is None else {of.call.name: str(of.call.kind) for of in costs.calls}
        train = [row for row in self.metrics if row["kind"] == "train"]
        last = train[-1] if train else {}
        step = find_last_step(self.path, kinds)
        looks = (
            {look for box in step.drawing.boxes for look in box.look.split()} if step is not None else set()
        )
        measured = ""
        if step is not None:
            measured = f"{format_seconds(step.seconds)} measured"
            if step.predicted_seconds is not None:
                measured += f", {format_seconds(step.predicted_seconds)} predicted"
        return find_template("run.html.jinja").render(
            title=repr(self),
            metrics=[(name, _show(last[name])) for name in last if name not in ("kind", "seconds")],
            step=step,
            no_step="No step is traced yet: a training step writes its trace (debug.traced_steps).",
            measured=measured,
            legend=[(look, text) for look, text in LEGEND if look.split()[-1] in looks],
            costs=[] if costs is None else [_list_cells(cost) for cost in list_costs(costs)],
            note=note,
            samples=[(_text(of.get("prompt")), _show_answer(of)) for of in self.samples[:3]],
        )


def _describe_medians(costs: "Comparison") -> str:
    from realrl.cli.costs import compares

    steps = costs.step.steps
    text = f"Medians of {steps} steps" if steps > 1 else "Times of one step"
    if costs.spec is None:
        return f"{text}. There are no predictions, because the kind of the devices is not known."
    few = "" if compares(costs) else ", too few to judge predictions by"
    return f"{text}{few}. Predictions are for the measured lengths."


def _list_cells(cost: "Cost") -> list[str]:
    """List the cells of a row: name, placement, predicted and measured seconds, and their ratio."""
    from realrl.cli.page.text import format_measured

    before, after = cost.predicted_seconds, cost.seconds
    seconds = ["" if value is None else format_measured(value) for value in (before, after)]
    return [cost.name, cost.placement or "", *seconds, f"{after / before:.2f}" if before and after else ""]


def _show(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _show_answer(sample: dict[str, Any]) -> str:
    """Show an answer; a trajectory with the turns of the model in [[ ]]."""
    from realrl.cli.page.trajectory import mark_parts, read_parts

    parts = read_parts(sample)
    return _text(sample.get("completion") if parts is None else mark_parts(parts))


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 200 else f"{text[:200]}…"
