"""Listener for the progress of a run."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from realrl.planner.report.comparison import Comparison
from realrl.recipe.experiment import Experiment


@dataclass(frozen=True)
class MetricsRecord:
    """One line of metrics.jsonl."""

    step: int
    """Number of training steps done."""
    kind: str
    """`train` or `eval`."""
    seconds: float
    """Duration of the step or evaluation."""
    metrics: Mapping[str, float]
    """Metrics by `call/name`."""


class RunObserver(Protocol):
    """Listener for the progress of a run, on the rank that writes."""

    ends: bool
    """Whether training should end after this step, as if it were the last one."""

    def begin(self, experiment: Experiment, steps: int) -> None:
        """Begin: everything is loaded, and the first step follows."""

    def note(self, text: str) -> None:
        """Show a note."""

    def record(self, record: MetricsRecord) -> None:
        """Take the metrics of a training step or an evaluation."""

    def costs(self, comparison: Comparison) -> None:
        """Take measured and predicted costs, after the last step."""

    def end(self, run_dir: str, seconds: float) -> None:
        """End, after the last step."""
