"""Search for the plan of a recipe. If none fits, try changes one after the other. Does not import torch."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from realrl.config.errors import UserError
from realrl.families.sizes import SHAPES
from realrl.plan.plan import Plan
from realrl.planner.report.report import describe_gap
from realrl.planner.report.shortage_text import describe_shortage
from realrl.planner.search.plan_search import UserConstraints, find_best_plan, find_plan
from realrl.planner.search.search import DEFAULT_EFFORT, SearchBudget
from realrl.planner.search.shortage import DoesNotFit, Shortage
from realrl.planner.simulate.scenario import Scenario
from realrl.runtime.prepare.fit.changes import Attempts, Change, Draft, list_search_changes

_SHARE = 0.6
"""Share of the remaining time that one kind of change may use."""


@dataclass(frozen=True)
class Outcome:
    """Result of assessing a draft."""

    shortfall: float
    """Bytes that the peak device lacks; at most 0 if everything fits."""
    figures: str
    """Needed memory or step time in words, for example `needs 72 GiB`."""

    @property
    def fits(self) -> bool:
        """Whether every device has enough memory."""
        return self.shortfall <= 0


Result = TypeVar("Result", bound=Outcome)


@dataclass(frozen=True)
class Remedy(Generic[Result]):
    """Changes that make everything fit, and the result."""

    changes: tuple[Change, ...]
    outcome: Result

    def __str__(self) -> str:
        """Format the changes, for example `with recompute=true (needs 72 GiB)`."""
        texts = " and ".join(change.text for change in self.changes)
        return f"{self.changes[0].preposition} {texts} ({self.outcome.figures})"


def describe_remedies(remedies: Sequence[Remedy[Result]]) -> str:
    """Write remedies as a clause, for example `it fits on 4 nodes (step 3 s), or with data.batch=8 (step 9 s)`."""
    return f"it fits {', or '.join(map(str, remedies))}"


class Trials(Generic[Result]):
    """Tries changes within a time limit."""

    def __init__(self, assess: Callable[[Draft, float], Result], seconds: float) -> None:
        """`assess(draft, limit)` assesses a draft in about `limit` seconds. `seconds` limits all trials together.

        `assess` raises UserError for an impossible draft.
        """
        self._assess = assess
        self._end = time.monotonic() + seconds

    def find_remedies(self, draft: Draft, sources: Iterable[Attempts], most: int) -> list[Remedy[Result]]:
        """Find at most one remedy of each kind of change in `sources`, and at most `most` remedies in all."""
        found: list[Remedy[Result]] = []
        for source in sources:
            if len(found) == most:
                break
            deadline = time.monotonic() + _SHARE * self._left(self._end)
            fitting = [(c, result) for c, result in self._tried(source, draft, deadline) if result.fits]
            found += [Remedy((change,), result) for change, result in fitting[-1:]]
        return found

    def find_combination(
        self, draft: Draft, result: Result, sources: Callable[[Draft, Result], Iterable[Attempts]]
    ) -> Remedy[Result] | None:
        """Find a combination of changes: apply the best change again and again, until everything fits.

        `result` is the result for the draft itself. `sources` lists the kinds of changes that may help a draft with
        this result.
        """
        chosen: list[Change] = []
        while not result.fits:
            for source in sources(draft, result):
                change, result_then = self._best(source, draft, result)
                if change is not None:
                    break
            else:
                return None
            chosen.append(change)
            draft, result = change.apply(draft), result_then
        return Remedy(tuple(chosen), result)

    def _best(self, source: Attempts, draft: Draft, result: Result) -> tuple[Change | None, Result]:
        """Return the change of one kind with the smallest shortfall, and its result.

        The change is None if none helps.
        """
        best: Change | None = None
        for change, after in self._tried(source, draft, self._end):
            if after.shortfall < result.shortfall:
                best, result = change, after
        return best, result

    def _tried(self, source: Attempts, draft: Draft, deadline: float) -> Iterator[tuple[Change, Result]]:
        """Yield the possible changes of one kind with their results, until the deadline."""
        change = next(source, None)
        while change is not None and self._left(deadline) > 0:
            try:
                result = self._assess(change.apply(draft), self._left(deadline))
            except UserError:
                fits = False
            else:
                fits = result.fits
                yield change, result
            try:
                change = source.send(fits)
            except StopIteration:
                return

    @staticmethod
    def _left(deadline: float) -> float:
        return deadline - time.monotonic()


_BUDGET = SearchBudget(plans=20_000, chains=128, rounds=100, nodes=2000)
_SEARCH_EFFORT = 200_000
"""Effort of one short search."""
_NAMED = 3
"""Maximum number of suggestions."""


@dataclass(frozen=True)
class SearchedPlan:
    """A plan that a search has found."""

    plan: Plan
    step_seconds: float
    """Predicted seconds of a step."""
    about: str
    """Predicted time and optimality gap, in one line."""


def search_plan(
    draft: Draft, constraints: UserConstraints, *, effort: float = DEFAULT_EFFORT
) -> SearchedPlan:
    """Search for the best plan. Raises UserError with suggestions if no plan fits."""
    scenario = draft.scenario()
    try:
        best = find_best_plan(scenario, effort=effort, constraints=constraints)
    except DoesNotFit as error:
        raise explain_no_plan(draft, scenario, error.shortage, constraints) from None
    about = (
        f"{best.estimate.step_seconds:.3g} s a step predicted, {describe_gap(best.gap)},"
        f" searched in {best.seconds:.1f} s"
    )
    return SearchedPlan(best.estimate.plan, best.estimate.step_seconds, about)


def explain_no_plan(
    draft: Draft,
    scenario: Scenario,
    shortage: Shortage,
    constraints: UserConstraints,
    *,
    seconds: float = 15.0,
) -> UserError:
    """Create the error for a search that raised DoesNotFit.

    Takes up to `seconds` to look for changes that make a plan fit.
    """
    found = find_remedies(draft, constraints, seconds=seconds)
    helps = describe_remedies(found) if found else "no change that was tried would be enough"
    none = "no plan fits" if shortage.proven else "no plan was found that fits"
    even = ", even with recomputation and offloading" if constraints.search_space.offload else ""
    return UserError(
        f"{none} {_models(scenario)} on {scenario.spec.name}{even}: at best"
        f" {describe_shortage(scenario, shortage)}: {shortage.factor:.3g} times what it has; {helps}"
    )


def find_remedies(draft: Draft, constraints: UserConstraints, *, seconds: float) -> list[Remedy[Outcome]]:
    """Find changes with which some plan fits, the cheapest first, by short searches."""

    def assess(changed: Draft, _: float) -> Outcome:
        # Leave out presets, which would be evaluated again in each short search.
        try:
            found = find_plan(
                changed.scenario(),
                effort=_SEARCH_EFFORT,
                constraints=replace(constraints, own={}),
                presets={},
                budget=_BUDGET,
            )
        except DoesNotFit as error:
            return Outcome(error.shortage.needed_bytes - error.shortage.limit_bytes, "")
        return Outcome(0.0, f"step {found.result.evaluation.seconds:.3g} s")

    return Trials(assess, seconds).find_remedies(draft, list_search_changes(draft), _NAMED)


def _models(scenario: Scenario) -> str:
    """List the models of a step with their roles, such as `llama-2-7b (actor, ref)`."""
    names = {shape: name for name, shape in SHAPES.items()}
    roles: dict[str, list[str]] = {}
    for role, model in scenario.models.items():
        plain = model.shape.model_copy(update={"lora": None, "quantised": None})
        roles.setdefault(names.get(plain, "models"), []).append(role)
    return " and ".join(f"{name} ({', '.join(of)})" for name, of in roles.items())
