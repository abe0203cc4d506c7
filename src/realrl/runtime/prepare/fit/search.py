"""Search for the plan of a draft, and suggested changes where none fits. No torch."""

from dataclasses import dataclass, replace

from realrl.config.errors import UserError
from realrl.families.sizes.published import SHAPES
from realrl.plan.plan import Plan
from realrl.planner.report.gap import describe_gap
from realrl.planner.report.shortage_text import describe_shortage
from realrl.planner.search.plan_search import UserConstraints, find_best_plan, find_plan
from realrl.planner.search.search import DEFAULT_EFFORT, SearchBudget
from realrl.planner.search.shortage import DoesNotFit, Shortage
from realrl.planner.simulate.scenario import Scenario
from realrl.runtime.prepare.fit.change import Draft
from realrl.runtime.prepare.fit.remedies import Outcome, Remedy, Trials, describe_remedies
from realrl.runtime.prepare.fit.search_changes import list_search_changes

_BUDGET = SearchBudget(plans=20_000, chains=128, rounds=100, nodes=2000)
_SEARCH_EFFORT = 200_000
"""Effort of one short search."""
_NAMED = 3
"""Maximum number of suggested changes."""


@dataclass(frozen=True)
class SearchedPlan:
    """Plan found by a search."""

    plan: Plan
    step_seconds: float
    """Predicted seconds of a step."""
    about: str
    """Predicted time and optimality gap, in one line."""


def search_plan(
    draft: Draft, constraints: UserConstraints, *, effort: float = DEFAULT_EFFORT
) -> SearchedPlan:
    """Search for the best plan; UserError, with what would help, where no plan fits."""
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
    """Make the error message where a search for a plan of a draft raised DoesNotFit.

    Looks for changes with which a plan fits, for `seconds`.
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
    """Find changes with which some plan fits, the cheapest first, each by a short search."""

    def assess(changed: Draft, _: float) -> Outcome:
        # Without presets, at whose best a search of its own looks each time.
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
    """List models by name where they have one, with their roles."""
    names = {shape: name for name, shape in SHAPES.items()}
    roles: dict[str, list[str]] = {}
    for role, model in scenario.models.items():
        plain = model.shape.model_copy(update={"lora": None, "quantised": None})
        roles.setdefault(names.get(plain, "models"), []).append(role)
    return " and ".join(f"{name} ({', '.join(of)})" for name, of in roles.items())
