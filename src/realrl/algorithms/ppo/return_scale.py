"""Scale of returns over a run."""

from typing import Literal

from realrl.algorithms.policy.normalization import Moments

# Returns that hardly vary are not blown up further than tenfold (the floor in Yu et al. 2022, MAPPO).
MIN_VARIANCE = 1e-2


class ReturnScale:
    """Standard deviation of the returns of a run, the unit in which errors of values are measured.

    The mean over steps is weighted: `running` by each step's count of returns, `exponential` by
    (1 - beta) beta^age with the usual correction for the start (Kingma and Ba 2015, section 3).
    Before the first update, and always for `none`, the deviation is 1.

    The critic's output is never scaled, so its predictions stay what they are when the statistics move, as PopArt
    (van Hasselt et al. 2016) makes them by rewriting the last layer.
    """

    def __init__(self, mode: Literal["none", "running", "exponential"], *, beta: float) -> None:
        self._mode = mode
        self._beta = beta
        self._weight = self._total = self._squares = 0.0

    def update(self, returns: Moments) -> None:
        """Add the returns of one step."""
        if self._mode == "none" or not returns.count:
            return
        keep, add = (1.0, returns.count) if self._mode == "running" else (self._beta, 1 - self._beta)
        self._weight = keep * self._weight + add
        self._total = keep * self._total + add * returns.mean
        self._squares = keep * self._squares + add * returns.mean_square

    @property
    def std(self) -> float:
        """Deviation of returns, not below the root of MIN_VARIANCE."""
        if not self._weight:
            return 1.0
        mean = self._total / self._weight
        variance: float = max(self._squares / self._weight - mean**2, MIN_VARIANCE)
        return variance**0.5

    def state_dict(self) -> dict[str, float]:
        """Save the weighted sums."""
        return {"value_weight": self._weight, "value_total": self._total, "value_squares": self._squares}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Load the sums, unless errors are not scaled."""
        if self._mode != "none":
            self._weight = state["value_weight"]
            self._total = state["value_total"]
            self._squares = state["value_squares"]
