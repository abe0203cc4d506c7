"""`plan: search`: the plan that the planner finds for a recipe, kept for the next run. No torch."""

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.resources import as_file, files
from pathlib import Path

from realrl import __version__
from realrl.config.errors import UserError
from realrl.config.files import reason_of
from realrl.families.registry import layer_options, model_tensors
from realrl.plan.plan import Plan
from realrl.planner.cluster.spec import ClusterSpec
from realrl.planner.evaluate.shortage import DoesNotFit
from realrl.planner.profile.profile import Profile
from realrl.planner.report.remedies import no_plan
from realrl.planner.search.plan_search import Wanted, best_plan
from realrl.planner.simulate.scenario import Scenario
from realrl.recipe.experiment import Experiment
from realrl.runtime.prepare.scenario import make_scenario, wanted_plans


@dataclass(frozen=True)
class SearchedPlan:
    """A plan that was found."""

    plan: Plan
    step_seconds: float
    """Predicted."""
    about: str
    """What it costs, and how good it is, in one line."""


def cached_plan(experiment: Experiment, spec: ClusterSpec, say: Callable[[str], None]) -> Plan:
    """The plan of a recipe that says `plan: search`, from an earlier search for the same step on the same devices,
    else from a search now, which is kept.

    `say` is told where the plan is from and what is expected of it. UserError where no plan fits.
    """
    scenario, wanted = _scenario(experiment, spec), wanted_plans(experiment, spec)
    file = plans_directory() / f"{_key(scenario, wanted)}.yaml"
    kept = _read(file, scenario)
    if kept is not None:
        say(f"plan: {kept[1]}; found earlier, kept in {file}")
        return kept[0]
    found = _search(scenario, wanted)
    say(f"plan: {found.about}; {_write(file, found, scenario)}")
    return found.plan


def search_plan(experiment: Experiment, spec: ClusterSpec, *, seconds: float) -> SearchedPlan:
    """Search for a plan in place of a recipe's; nothing is read or kept. UserError where no plan fits."""
    wanted = replace(wanted_plans(experiment, spec), own={})
    return _search(_scenario(experiment, spec), wanted, seconds)


def plans_directory() -> Path:
    """Where plans are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "realrl" / "plans"


def _scenario(experiment: Experiment, spec: ClusterSpec) -> Scenario:
    profile = None if experiment.profile is None else Profile.load(experiment.profile)
    return make_scenario(experiment, spec, profile=profile)


def _search(scenario: Scenario, wanted: Wanted, seconds: float | None = None) -> SearchedPlan:
    try:
        best = best_plan(scenario, seconds=seconds, wanted=wanted)
    except DoesNotFit as error:
        raise no_plan(scenario, error.shortage, wanted) from None
    about = (
        f"{best.estimate.step_seconds:.3g} s a step predicted, at most {best.gap:.1%} from the best possible,"
        f" searched in {best.seconds:.1f} s"
    )
    return SearchedPlan(best.estimate.plan, best.estimate.step_seconds, about)


def _key(scenario: Scenario, wanted: Wanted) -> str:
    """A hash of all that a search depends on, the package's own source text among it."""
    graph, profile = scenario.graph, scenario.cost.profile
    parts: list[object] = [
        (graph.calls, tuple(graph.keys.values()), graph.averages),
        sorted(scenario.models.items()),
        # A user's family is no source text of the package.
        [(model_tensors(m.shape, m.head), layer_options(m.shape)) for m in scenario.models.values()],
        scenario.spec.groups,
        scenario.workload,
        scenario.cost.efficiency,
        scenario.memory.efficiency,
        None if profile is None else profile.model_dump_json(),
        wanted,
        __version__,
        *_sources(),
    ]
    return hashlib.sha256("\n".join(map(repr, parts)).encode()).hexdigest()[:32]


def _sources() -> Iterator[str]:
    """Source text of every module of the package: whatever a plan may depend on is among them."""
    with as_file(files("realrl")) as package:
        for file in sorted(package.rglob("*.py")):
            yield file.read_text(encoding="utf-8")


def _read(file: Path, scenario: Scenario) -> tuple[Plan, str] | None:
    """A plan that was kept, and what was said about it; None where there is none that can be used."""
    try:
        first = file.read_text(encoding="utf-8").partition("\n")[0]
        plan = Plan.load(file)
        plan.check(scenario.graph, {role: model.shape for role, model in scenario.models.items()})
    except (OSError, UnicodeDecodeError, UserError):
        return None
    usable = first.startswith(_HEADER) and plan.cluster == scenario.spec.cluster
    return (plan, first.removeprefix(_HEADER)) if usable else None


_HEADER = "# realrl plan: "


def _write(file: Path, found: SearchedPlan, scenario: Scenario) -> str:
    """Keep a plan, all of it or nothing; where it is kept, in words."""
    calls = ", ".join(call.name for call in scenario.graph.calls)
    made = datetime.now(UTC).date().isoformat()
    text = (
        f"{_HEADER}{found.about}\n"
        f"# {calls} on {scenario.spec.name}, by realrl {__version__} on {made}\n{found.plan.to_text()}"
    )
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False, encoding="utf-8") as scratch:
            scratch.write(text)
        os.replace(scratch.name, file)
    except OSError as error:
        return f"not kept, since {file.parent} cannot be written ({reason_of(error)})"
    return f"kept in {file}"
