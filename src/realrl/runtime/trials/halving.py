"""Successive halving: measure several plans for a few steps, and the faster half of them for twice as many.

K. Jamieson and A. Talwalkar, "Non-stochastic best arm identification and hyperparameter optimization", AISTATS
2016. No torch.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from realrl.planner.calibration.comparison import Comparison


class TrialFailed(Exception):
    """Failure of a plan to run, with the reason."""


class OutOfTime(Exception):
    """End of the time for trials before the end of a run."""


@dataclass
class Trial:
    """Runs of one plan so far."""

    name: str
    runs: list[Comparison] = field(default_factory=list)
    failure: str = ""
    """Why it was dropped; empty unless it failed."""

    @property
    def steps(self) -> int:
        """Steps that were measured."""
        return sum(run.step.steps for run in self.runs)

    @property
    def seconds(self) -> float:
        """Seconds of a step: the medians of all runs, weighted by their steps; infinite without runs."""
        return (
            sum(run.step.median * run.step.steps for run in self.runs) / self.steps
            if self.runs
            else float("inf")
        )


@dataclass
class PlanTrials:
    """Plans that are tried, by name, and those still in the contest."""

    tried: dict[str, Trial]
    standing: list[str]
    complete: bool = False
    """Whether the contest was decided; else it was ended by the time limit or the user."""

    @classmethod
    def of(cls, names: Iterable[str]) -> "PlanTrials":
        """Begin with these plans."""
        tried = {name: Trial(name) for name in names}
        return cls(tried, list(tried))

    @property
    def fastest(self) -> Trial | None:
        """The fastest plan as measured, of those still in the contest; None while nothing was measured."""
        measured = [self.tried[name] for name in self.standing if self.tried[name].runs]
        # Those that were measured longest have come further.
        return min(measured, key=lambda trial: (-len(trial.runs), trial.seconds), default=None)

    def run(
        self,
        measure: Callable[[str, int], Comparison],
        steps: int,
        say: Callable[[Trial], None] = lambda _: None,
    ) -> None:
        """Measure plans by name for some steps, until one is left or `measure` raises OutOfTime.

        Those for which it raises TrialFailed are dropped. `say` is called after each run.
        """
        try:
            while self.standing:
                for name in tuple(self.standing):
                    self._measure(self.tried[name], measure, steps)
                    say(self.tried[name])
                self.standing = self._keep_faster_half(self.standing)
                if len(self.standing) <= 1:
                    break
                steps *= 2
            self.complete = True
        except OutOfTime:
            pass

    def _measure(self, trial: Trial, measure: Callable[[str, int], Comparison], steps: int) -> None:
        try:
            trial.runs.append(measure(trial.name, steps))
        except TrialFailed as failure:
            trial.failure = str(failure)
            self.standing.remove(trial.name)

    def _keep_faster_half(self, names: Sequence[str]) -> list[str]:
        ordered = sorted(names, key=lambda name: self.tried[name].seconds)
        return ordered[: -(-len(ordered) // 2)]
