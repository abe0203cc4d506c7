"""Best evaluation of a run so far."""

from collections.abc import Mapping
from math import isfinite
from typing import Any

from realrl.config.errors import UserError
from realrl.config.explain import nearest
from realrl.recipe.evaluation import BestConfig


class BestEvaluation:
    """Best evaluation so far by a metric; of equal ones the first."""

    def __init__(self, settings: BestConfig | None) -> None:
        """`settings` is None for a run that keeps none."""
        self.settings = settings
        self._step: int | None = None
        self._value: float | None = None

    def take(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Take the metrics of an evaluation after `step` training steps; tell whether it is the best one.

        A value that is not finite is not. UserError where there is no such metric.
        """
        assert self.settings is not None, "a best evaluation is kept"
        name = self.settings.metric
        if name not in metrics:
            hint = nearest(name, metrics)
            known = f"did you mean {hint}?" if hint else f"there are {', '.join(metrics)}"
            raise UserError(f"evaluation.best.metric={name}: evaluations have no such metric; {known}")
        value = metrics[name]
        if not isfinite(value):
            return False
        sign = 1 if self.settings.keep == "highest" else -1
        if self._value is not None and sign * value <= sign * self._value:
            return False
        self._step, self._value = step, value
        return True

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Go on from what `to_json` gave, unless that was by another metric."""
        if self.settings is not None and saved.get("metric") == self.settings.metric:
            self._step, self._value = saved["step"], saved["value"]

    def to_json(self) -> dict[str, Any]:
        """Describe it as files have it: the metric, its value, and the training steps before it."""
        assert self.settings is not None, "a best evaluation is kept"
        return {"metric": self.settings.metric, "value": self._value, "step": self._step}
