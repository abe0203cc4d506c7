"""Interface for listening to the progress of a run."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from realrl.planner.report.comparison import Comparison
    from realrl.recipe.experiment import Experiment


@dataclass(frozen=True)
class MetricsRecord:
    """One line of metrics.jsonl."""

    step: int
    """Number of finished training steps."""
    kind: str
    """`train` or `eval`."""
    seconds: float
    """Duration of the step or evaluation in seconds."""
    metrics: Mapping[str, float]
    """Metrics by `call/name`."""


@dataclass
class Wishes:
    """What callbacks ask the run to change."""

    ends: bool = False
    """Whether training should end after this step, as if it were the last one."""
    rate_factor: float | None = None
    """Factor of the learning rates from the next step on; None if no callback has asked for one."""


class RunObserver(Protocol):
    """Listener for the progress of a run, on the rank that writes."""

    wishes: Wishes

    def begin(self, experiment: "Experiment", steps: int) -> None:
        """Called when everything is loaded, before the first step."""

    def note(self, text: str) -> None:
        """Called with a note for the user."""

    def record(self, record: MetricsRecord) -> None:
        """Called with the metrics of a training step or an evaluation."""

    def costs(self, comparison: "Comparison") -> None:
        """Called with measured and predicted costs, after the last step."""

    def end(self, run_dir: str, seconds: float) -> None:
        """Called at the end, after the last step."""
