"""`realrl report`."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table
    from rich.text import Text

    from realrl.cli.monitoring.metrics import MetricLine
    from realrl.cli.page.trajectory import Part
    from realrl.runtime.output.algorithm_record import AlgorithmRecord

_SHOWN_SAMPLES, _MOST_COLUMNS = 3, 4
"""Number of samples in the table, and maximum number of curves side by side."""


def report(
    run_dirs: Annotated[list[str], typer.Argument(help="Directories of finished runs.")],
    out: Annotated[str, typer.Option(metavar="DIR", help="Directory for report.json and report.png.")],
) -> None:
    """Summarize finished runs: a table and samples here, metrics in report.json, curves in report.png."""
    from realrl.config.errors import RunError, UserError
    from realrl.config.files import check_directory, check_file, reason_of, whole_file, write_whole
    from realrl.config.paths import local_path

    if find_spec("matplotlib") is None:
        raise UserError("the curves of a report need matplotlib: pip install 'realrl[demo]'")
    runs = _read_runs(run_dirs)
    folder = local_path(out)
    check_directory(f"--out {out}", folder)
    numbers = folder / "report.json"
    picture = folder / "report.png"
    for file in (numbers, picture):
        check_file(str(file), file)
    metrics = [*_list_metrics(runs)]
    seconds = {name: run.seconds for name, run in runs.items()}
    seconds["total"] = sum(seconds.values())
    summary = {key: value for key, _, value in metrics} | {"seconds": seconds}
    try:
        write_whole(numbers, json.dumps(summary, indent=2) + "\n")
        with whole_file(picture) as partial:
            make_figure(runs).savefig(partial, format="png", dpi=120)
    except OSError as error:
        raise RunError(f"--out {out} cannot be written: {reason_of(error)}") from error
    _print_report(runs, metrics, seconds)
    typer.echo(f"metrics: {numbers}   curves: {picture}")


@dataclass(frozen=True)
class FinishedRun:
    """Metrics and samples of a finished run."""

    path: Path
    algorithm: "AlgorithmRecord"
    lines: tuple["MetricLine", ...]
    samples: tuple[list[dict[str, Any]], ...]
    """Samples of each evaluation, in order. A sample has a prompt, a completion and numbers. With an environment,
    it also has the parts of its trajectory, and whether the environment failed."""
    seconds: float
    """Wall time."""

    def values(self, kind: Literal["train", "eval"], metric: str) -> list[tuple[int, float | None]]:
        """List the steps and values of a metric, given by its name or by the part after its last slash."""
        from realrl.cli.monitoring.metrics import find_metric

        named = ((line, find_metric(line.metrics, metric)) for line in self.lines if line.kind == kind)
        return [(line.step, line.metrics[name]) for line, name in named if name is not None]

    def series(self, kind: Literal["train", "eval"], metric: str) -> tuple[list[int], list[float]]:
        """List the steps and the finite values of a metric."""
        known = [(step, value) for step, value in self.values(kind, metric) if value is not None]
        return [step for step, _ in known], [value for _, value in known]

    def last_step(self) -> dict[str, float | None]:
        """Find the losses and the summary metrics of the last training step."""
        from realrl.cli.monitoring.metrics import find_metric

        trained = next((line.metrics for line in reversed(self.lines) if line.kind == "train"), {})
        summary = {find_metric(trained, metric.metric) for metric in self.algorithm.summary}
        return {name: trained[name] for name in trained if name.endswith("/loss") or name in summary}


def _read_runs(directories: Sequence[str]) -> dict[str, FinishedRun]:
    """Read one run per algorithm. Raises UserError if two runs have the same algorithm."""
    from realrl.config.errors import UserError

    runs: dict[str, FinishedRun] = {}
    for directory in directories:
        run = read_run(directory)
        name = run.algorithm.name
        if name in runs:
            raise UserError(
                f"{runs[name].path} and {run.path} are both {name} runs; a report takes one of each"
            )
        runs[name] = run
    return runs


def read_run(directory: str) -> FinishedRun:
    """Read a run directory. Raises UserError with the file and the line that is missing or malformed."""
    from realrl.config.errors import UserError
    from realrl.config.paths import local_path
    from realrl.runtime.output.algorithm_record import RECORD

    path = local_path(directory)
    for name in ("config.yaml", RECORD, "metrics.jsonl"):
        if not (path / name).exists():
            raise UserError(f"{directory} holds no finished run: {name} is missing")
    try:
        return _read_run(path)
    except UserError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise UserError(
            f"{directory} is not a run directory that this version understands: {error!r}"
        ) from None


def _read_run(path: Path) -> FinishedRun:
    from realrl.checkpoint.saved import find_saved
    from realrl.cli.monitoring.metrics import MetricLine, read_rows
    from realrl.cli.page.trajectory import NUMBERS, has_failed, read_parts
    from realrl.config.errors import UserError
    from realrl.config.yaml_file import read_yaml
    from realrl.runtime.output.algorithm_record import AlgorithmRecord

    algorithm = AlgorithmRecord.load(path)
    if not (path / "summary.json").exists():
        saved = find_saved(path, algorithm.trained)
        steps = read_yaml(str(path / "config.yaml"))["training"]["steps"]
        raise UserError(
            f"{path}: a report takes finished runs; this run is still going, or ended {saved.describe(steps)}"
        )
    keys = (*algorithm.sample_keys, "judge", *NUMBERS)
    return FinishedRun(
        path=path,
        algorithm=algorithm,
        lines=tuple(map(MetricLine.parse, read_rows(path / "metrics.jsonl"))),
        samples=tuple(
            [
                {"prompt": row["prompt"], "completion": row["completion"]}
                | {"numbers": {key: row[key] for key in keys if key in row}}
                | {"parts": read_parts(row), "failed": has_failed(row)}
                for row in read_rows(file)
            ]
            for file in sorted((path / "samples").glob("step-*.jsonl"))
        ),
        seconds=json.loads((path / "summary.json").read_text(encoding="utf-8"))["seconds"],
    )


def _list_metrics(runs: Mapping[str, FinishedRun]) -> Iterator[tuple[str, str, float | None]]:
    """Yield the summary metrics of the runs: key in report.json, label in the table, value (None if not finite).

    A key that several algorithms use starts with the algorithm's name and a dot. A run without evaluations has the
    losses and summary metrics of its last training step instead, under `ALGORITHM.METRIC`.
    """
    uses = Counter(metric.key for run in runs.values() for metric in run.algorithm.summary)
    for name, run in runs.items():
        for metric in run.algorithm.summary:
            values = run.values("eval", metric.metric)
            if values:
                key = metric.key if uses[metric.key] == 1 else f"{name}.{metric.key}"
                yield key, metric.label, values[0 if metric.at == "first" else -1][1]
        if all(line.kind == "train" for line in run.lines):
            for measured, value in run.last_step().items():
                yield f"{name}.{measured}", f"{name}: {measured} of the last step", value


def make_figure(runs: Mapping[str, FinishedRun]) -> "Figure":
    """Draw one panel per curve: a line for training, dots for evaluations."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = [
        (f"{run.algorithm.name}: {label}", run.series("train", metric), run.series("eval", metric))
        for run in runs.values()
        for metric, label in run.algorithm.curves.items()
    ]
    panels = [panel for panel in panels if panel[1][0] or panel[2][0]]
    columns = max(1, min(len(panels), _MOST_COLUMNS))
    rows = max(1, -(-len(panels) // columns))
    picture = Figure(figsize=(4 * columns, 3 * rows), layout="constrained")
    FigureCanvasAgg(picture)
    for number, (title, trained, evaluated) in enumerate(panels, 1):
        axes = picture.add_subplot(rows, columns, number)
        if trained[0]:
            axes.plot(*trained, color="#7a9cc6", linewidth=1.2, label="training")
        if evaluated[0]:
            axes.plot(*evaluated, color="#c0392b", linewidth=1, marker="o", markersize=4, label="evaluation")
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("step", fontsize=8)
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.25)
        axes.legend(fontsize=8, frameon=False)
    return picture


def _print_report(
    runs: Mapping[str, FinishedRun],
    metrics: Sequence[tuple[str, str, float | None]],
    seconds: Mapping[str, float],
) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(title="Metrics", title_justify="left", show_header=False)
    for _, label, value in metrics:
        table.add_row(label, "not finite" if value is None else f"{value:.4g}")
    for name, taken in seconds.items():
        table.add_row(f"wall time, {name}", f"{taken:.0f} s")
    console.print(table)
    for run in runs.values():
        if len(run.samples) > 1:
            coloured = console.color_system is not None and not console.no_color
            console.print(_sample_table(run.samples[0], run.samples[-1], coloured=coloured))


def _sample_table(
    before: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]], *, coloured: bool
) -> "Table":
    """Make a table with the first and the last completion of each prompt side by side.

    Turns of the model are green in a trajectory, or in [[ ]] without colour.
    """
    from rich.table import Table
    from rich.text import Text

    from realrl.cli.page.trajectory import FAILED, SAMPLED, WRITTEN

    def completion(sample: dict[str, Any]) -> "Text":
        numbers = [
            f"{name} {value}" if isinstance(value, int) else f"{name} {value:+.2f}"
            for name, value in sample["numbers"].items()
            if value is not None
        ]
        text = Text(sample["completion"].strip())
        if sample["parts"] is not None:
            text = Text("\n").join(_show_part(part, coloured=coloured) for part in sample["parts"])
        if sample["failed"]:
            numbers.append(FAILED)
        labels = "\n" + "  ".join(numbers) if numbers else ""
        return Text.assemble(text, (labels, "dim"))

    looks = f"green: {SAMPLED}, dim: {WRITTEN}" if coloured else f"[[ ]]: {SAMPLED}, the rest: {WRITTEN}"
    trajectories = any(sample["parts"] is not None for sample in after)
    title = Text.assemble("Samples", (f" ({looks})" if trajectories else "", "not italic"))
    table = Table(title=title, title_justify="left", show_lines=True)
    for heading in ("prompt", "before", "after"):
        table.add_column(heading, ratio=1)
    pairs = [(old, new) for old, new in zip(before, after, strict=False) if old["prompt"] == new["prompt"]]
    for old, new in pairs[:_SHOWN_SAMPLES]:
        # Text, not str: rich would read brackets in completions as markup.
        table.add_row(Text(old["prompt"]), completion(old), completion(new))
    return table


def _show_part(part: "Part", *, coloured: bool) -> "Text":
    """Show a part of a trajectory."""
    from rich.text import Text

    text = part.text.strip()
    if not coloured:
        text = f"[[{text}]]" if part.sampled else text
    reward = "" if part.reward is None else f" reward {part.reward:+.4g}"
    return Text.assemble((text, "green" if part.sampled else "dim"), (reward, "dim"))
