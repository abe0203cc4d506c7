"""Callbacks of a training run, on the rank that writes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from realrl.config.errors import UserCodeError, UserError
from realrl.planner.report.comparison import Comparison
from realrl.recipe.experiment import Experiment
from realrl.runtime.observer import MetricsRecord, RunObserver


@dataclass
class Step:
    """A training step or an evaluation, as callbacks see it."""

    step: int
    """Training steps done."""
    steps: int
    """Training steps of the run."""
    metrics: Mapping[str, float]
    """Metrics by name, such as `actor.train/loss`."""
    seconds: float
    """Duration of the step or evaluation."""
    ends: bool = field(default=False, repr=False)

    def stop(self) -> None:
        """End training after the current step: the final model is saved, and the run is finished."""
        self.ends = True


def check_callbacks(callbacks: Any) -> list[Any]:
    """Check callbacks: functions of a Step, and objects with `on_step` or `on_evaluation`. Raises UserError."""
    found = list(callbacks) if isinstance(callbacks, list | tuple) else [callbacks]
    for callback in found:
        if not callable(callback) and not any(
            hasattr(callback, name) for name in ("on_step", "on_evaluation")
        ):
            raise UserError(
                f"callbacks: {callback!r} is not a function, and has neither on_step nor on_evaluation"
            )
    return found


class CallbackObserver:
    """Observer that shows a run, and calls the callbacks of its script."""

    def __init__(self, shown: RunObserver, callbacks: Sequence[Any]) -> None:
        self._shown, self._callbacks, self._steps = shown, callbacks, 0
        self.ends = False

    def begin(self, experiment: Experiment, steps: int) -> None:
        """Begin, before the first step."""
        self._steps = steps
        self._shown.begin(experiment, steps)

    def note(self, text: str) -> None:
        """Show a note."""
        self._shown.note(text)

    def record(self, record: MetricsRecord) -> None:
        """Show metrics, and call the callbacks. Raises UserCodeError if one raises."""
        self._shown.record(record)
        step = Step(record.step, self._steps, record.metrics, record.seconds)
        for callback in self._callbacks:
            _call(callback, record.kind, step)
        self.ends = self.ends or step.ends

    def costs(self, comparison: Comparison) -> None:
        """Show measured and predicted costs."""
        self._shown.costs(comparison)

    def end(self, run_dir: str, seconds: float) -> None:
        """End, after the last step."""
        self._shown.end(run_dir, seconds)


def _call(callback: Any, kind: str, step: Step) -> None:
    named = getattr(callback, "on_step" if kind == "train" else "on_evaluation", None)
    function: Callable[[Step], Any] | None = named or (
        callback if kind == "train" and callable(callback) else None
    )
    if function is None:
        return
    try:
        function(step)
    except Exception as error:
        import traceback

        name = getattr(callback, "__name__", type(callback).__name__)
        trace = "".join(traceback.format_exception(error))
        raise UserCodeError(
            f"callbacks: {name} raised {type(error).__name__}: {error}", trace, alone=True
        ) from error
