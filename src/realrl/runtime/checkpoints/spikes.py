"""Spikes: values of a metric of training steps far above those before."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from realrl.config.errors import UserError
from realrl.config.explain import nearest
from realrl.recipe.data import SpikeConfig

_LEAST = 1e-3
"""Distance of values from their median, in units of it, below which they are taken for the same."""


@dataclass(frozen=True)
class Spike:
    """A value far above those before: after which step, counted from 1, what it was, and what is usual."""

    step: int
    value: float
    usual: float


class SpikeDetector:
    """Finder of spikes in a metric. It looks at values in the order of steps, on one rank."""

    def __init__(self, settings: SpikeConfig) -> None:
        self._settings = settings
        self._values: deque[float] = deque(maxlen=settings.window)

    def look(self, step: int, metrics: Mapping[str, float]) -> Spike | None:
        """Look at the metrics of a step; None where there is no spike. UserError where there is no such metric.

        A value that is not finite is one. Spikes do not count among the values that are usual.
        """
        name = self._settings.metric
        if name not in metrics:
            hint = nearest(name, metrics)
            known = f"did you mean {hint}?" if hint else f"there are {', '.join(metrics)}"
            raise UserError(f"training.spike.metric={name}: training steps have no such metric; {known}")
        value = metrics[name]
        usual = median(self._values) if self._values else value
        if 2 * len(self._values) >= self._settings.window:
            distance = median(abs(other - usual) for other in self._values)
            distance = max(distance, _LEAST * abs(usual))
            if not value - usual <= self._settings.factor * distance:
                return Spike(step, value, usual)
        if value == value:
            self._values.append(value)
        return None
