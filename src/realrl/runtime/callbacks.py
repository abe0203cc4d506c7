"""Callbacks of a training run. Only the rank that writes the run directory calls them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from realrl.config.errors import UserCodeError, UserError
from realrl.config.explain import nearest
from realrl.runtime.observer import MetricsRecord, RunObserver, Wishes

if TYPE_CHECKING:
    from realrl.planner.report.comparison import Comparison
    from realrl.recipe.experiment import Experiment


class StepMetrics(dict[str, float]):
    """Metrics by name. A missing name gets an error that lists the names."""

    def __missing__(self, name: str) -> float:
        hint = nearest(name, self)
        raise KeyError(
            f"there is no metric {name}; "
            + (f"did you mean {hint}? " if hint else "")
            + f"there are {', '.join(sorted(self))}"
        )


@dataclass
class Step:
    """A training step or an evaluation, as callbacks see it."""

    step: int
    """Number of finished training steps."""
    steps: int
    """Total number of training steps of the run."""
    metrics: Mapping[str, float]
    """Metrics by name, such as `actor.train/loss`."""
    seconds: float
    """Duration of the step or evaluation in seconds."""
    wishes: Wishes = field(default_factory=Wishes, repr=False)

    def stop(self) -> None:
        """End training after the current step. The final model is saved, and the run counts as finished."""
        self.wishes.ends = True

    def scale_learning_rate(self, factor: float) -> None:
        """From the next step on, multiply the learning rates of the schedules by `factor`, in place of earlier
        factors. Checkpoints keep it. Raises UserError for a number that is not finite or below 0."""
        if not isinstance(factor, int | float) or not 0 <= factor < float("inf"):
            raise UserError(f"scale_learning_rate: {factor!r} is not a finite number of at least 0")
        self.wishes.rate_factor = float(factor)


def check_callbacks(callbacks: Any) -> list[Any]:
    """Return callbacks as a list. Raises UserError for an object that is not a callback.

    A callback is a function that takes a Step, or an object with `on_step` or `on_evaluation`.
    """
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
    """Observer that passes events of a run on to another observer, and calls the user's callbacks."""

    def __init__(self, shown: RunObserver, callbacks: Sequence[Any]) -> None:
        """`shown` is the observer that shows the run."""
        self._shown, self._callbacks, self._steps = shown, callbacks, 0
        self.wishes = Wishes()

    def begin(self, experiment: "Experiment", steps: int) -> None:
        """Pass on the beginning of the run."""
        self._steps = steps
        self._shown.begin(experiment, steps)

    def note(self, text: str) -> None:
        """Pass on a note."""
        self._shown.note(text)

    def record(self, record: MetricsRecord) -> None:
        """Pass on metrics, and call the callbacks. Raises UserCodeError if a callback raises an exception."""
        self._shown.record(record)
        step = Step(record.step, self._steps, StepMetrics(record.metrics), record.seconds, self.wishes)
        for callback in self._callbacks:
            _call(callback, record.kind, step)

    def costs(self, comparison: "Comparison") -> None:
        """Pass on measured and predicted costs."""
        self._shown.costs(comparison)

    def end(self, run_dir: str, seconds: float) -> None:
        """Pass on the end of the run."""
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
    except UserError:
        raise
    except Exception as error:
        import traceback

        name = getattr(callback, "__name__", type(callback).__name__)
        trace = "".join(traceback.format_exception(error))
        raise UserCodeError(
            f"callbacks: {name} raised {type(error).__name__}: {error}", trace, alone=True
        ) from error
