"""Summary metrics of runs, as kept in report.json and shown in a table."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from realrl.cli.reporting.runs import FinishedRun


@dataclass(frozen=True)
class ReportedMetric:
    """A metric of one run: its key in report.json, its label in the table, and its value, None if not finite."""

    key: str
    label: str
    value: float | None


def list_metrics(runs: Mapping[str, FinishedRun]) -> list[ReportedMetric]:
    """Collect the metrics that the algorithms of `runs` (algorithm -> run) sum up, as far as the runs have them.

    A key that several algorithms use begins with the algorithm's name and a dot. A run without evaluations has what
    its last training step has of the losses and of these metrics, under `ALGORITHM.METRIC`.
    """
    uses = Counter(metric.key for run in runs.values() for metric in run.algorithm.summary)
    found = []
    for name, run in runs.items():
        for metric in run.algorithm.summary:
            pair = run.first_and_last(metric.metric)
            if pair is not None:
                key = metric.key if uses[metric.key] == 1 else f"{name}.{metric.key}"
                found.append(ReportedMetric(key, metric.label, pair[0 if metric.at == "first" else 1]))
        if all(line.kind == "train" for line in run.lines):
            for measured, value in run.last_step().items():
                label = f"{name}: {measured} of the last step"
                found.append(ReportedMetric(f"{name}.{measured}", label, value))
    return found


def summarize(runs: Mapping[str, FinishedRun], metrics: Sequence[ReportedMetric]) -> dict[str, Any]:
    """Summarize runs as in report.json: metrics by key, and `seconds`, the wall time of each run and in total."""
    seconds = {algorithm: run.seconds for algorithm, run in runs.items()}
    return {metric.key: metric.value for metric in metrics} | {
        "seconds": seconds | {"total": sum(seconds.values())}
    }
