"""Metrics and samples of a finished run, read from its directory for a report."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from realrl.checkpoint.saved import find_saved
from realrl.cli.reporting.metrics import MetricLine, find_metric, read_rows
from realrl.config.errors import UserError
from realrl.config.paths import local_path
from realrl.config.yaml_file import read_yaml
from realrl.runtime.output.algorithm_record import RECORD, AlgorithmRecord

LineKind = Literal["train", "eval"]


@dataclass(frozen=True)
class Sample:
    """Generated text, and the numbers that are shown with it."""

    prompt: str
    completion: str
    numbers: Mapping[str, float | None]
    """Key of the algorithm's `sample_keys`, or `judge` -> value; None where it was not finite."""


@dataclass(frozen=True)
class FinishedRun:
    """Finished run directory. samples: the sample files in the order they were written; seconds: wall time."""

    path: Path
    algorithm: AlgorithmRecord
    lines: tuple[MetricLine, ...]
    samples: tuple[tuple[Sample, ...], ...]
    seconds: float

    def series(self, kind: LineKind, metric: str) -> tuple[list[int], list[float]]:
        """List the steps and values of a metric, given by its name or by what follows its last slash."""
        points = [(line.step, _find(line.metrics, metric)) for line in self.lines if line.kind == kind]
        known = [(step, value) for step, value in points if value is not None]
        return [step for step, _ in known], [value for _, value in known]

    def first_and_last(self, metric: str) -> tuple[float | None, float | None] | None:
        """Find a metric at the first and the last evaluation; None if no evaluation has it.

        A value is None where it was not finite.
        """
        evaluations = (line.metrics for line in self.lines if line.kind == "eval")
        values = [metrics[name] for metrics in evaluations if (name := find_metric(metrics, metric))]
        return (values[0], values[-1]) if values else None

    def last_step(self) -> dict[str, float | None]:
        """Find the losses, and what the algorithm sums up, of the last training step; None if not finite."""
        trained = next((line.metrics for line in reversed(self.lines) if line.kind == "train"), {})
        summed_up = {find_metric(trained, metric.metric) for metric in self.algorithm.summary}
        return {name: trained[name] for name in trained if name.endswith("/loss") or name in summed_up}


def _find(metrics: dict[str, float | None], metric: str) -> float | None:
    name = find_metric(metrics, metric)
    return None if name is None else metrics[name]


def read_runs(directories: Sequence[str]) -> dict[str, FinishedRun]:
    """Read runs by algorithm; UserError for a directory without a finished run, or two runs of one algorithm."""
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
    """Read a run directory; UserError naming the file, and the line, that is missing or malformed."""
    path = local_path(directory)
    for name in ("config.yaml", RECORD, "metrics.jsonl"):
        if not (path / name).exists():
            raise UserError(f"{directory} holds no finished run: {name} is missing")
    try:
        return _read_run(path)
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{directory} is not a run directory this version understands: {error!r}") from None


def _read_run(path: Path) -> FinishedRun:
    if not (path / "summary.json").exists():
        raise UserError(f"{path}: {_describe_unfinished(path)}")
    algorithm = AlgorithmRecord.load(path)
    lines = map(MetricLine.parse, read_rows(path / "metrics.jsonl"))
    samples = (
        read_samples(file, algorithm.sample_keys) for file in sorted((path / "samples").glob("step-*.jsonl"))
    )
    return FinishedRun(
        path=path,
        algorithm=algorithm,
        lines=tuple(lines),
        samples=tuple(samples),
        seconds=json.loads((path / "summary.json").read_text(encoding="utf-8"))["seconds"],
    )


def read_samples(file: Path, keys: Sequence[str]) -> tuple[Sample, ...]:
    """Read the samples of an evaluation, with the numbers under `keys` and the judge's."""
    names = (*keys, "judge")
    return tuple(
        Sample(row["prompt"], row["completion"], {name: row[name] for name in names if name in row})
        for row in read_rows(file)
    )


def _describe_unfinished(path: Path) -> str:
    """Write the error message for a run that is still running, or that was interrupted."""
    saved = find_saved(path, AlgorithmRecord.load(path).trained)
    steps = read_yaml(str(path / "config.yaml"))["training"]["steps"]
    return f"a report takes finished runs, and this one goes on or has ended {saved.describe(steps)}"
