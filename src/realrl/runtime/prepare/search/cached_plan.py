"""Plan cache of `plan: search`. No torch."""

import hashlib
import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from realrl import __version__
from realrl.config.errors import UserError
from realrl.config.files import reason_of, write_whole
from realrl.plan.plan import Plan
from realrl.planner.cluster.cluster_spec import ClusterSpec
from realrl.planner.profile.profile import Profile
from realrl.planner.search.plan_search import UserConstraints
from realrl.planner.simulate.scenario import Scenario
from realrl.recipe.experiment import Experiment
from realrl.runtime.prepare.fit.change import Draft
from realrl.runtime.prepare.fit.search import SearchedPlan, search_plan
from realrl.runtime.prepare.scenarios import Measured, read_constraints
from realrl.runtime.prepare.search.fingerprint import make_fingerprint
from realrl.runtime.prepare.search.sources import read_sources


def cached_plan(experiment: Experiment, spec: ClusterSpec, say: Callable[[str], None]) -> Plan:
    """Load the plan of an earlier search for the same step on the same devices, or search now and cache it.

    `say` is called with the origin of the plan and its predicted time. UserError where no plan fits.
    """
    profile = None if experiment.profile is None else Profile.load(experiment.profile)
    draft, constraints = (
        Draft(experiment, spec, measured=Measured(profile)),
        read_constraints(experiment, spec),
    )
    scenario = draft.scenario()
    file = plans_directory() / f"{make_plan_key(scenario, constraints)}.yaml"
    kept = _read(file, scenario)
    if kept is not None:
        say(f"plan: {kept[1]}; found earlier, kept in {file}")
        return kept[0]
    found = search_plan(draft, constraints)
    say(f"plan: {found.about}; {_write(file, found, scenario)}")
    return found.plan


def plans_directory() -> Path:
    """Find the directory of kept plans."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "realrl" / "plans"


def make_plan_key(scenario: Scenario, constraints: UserConstraints) -> str:
    """Hash of all that a search depends on: the step, what is asked of plans, and the code that decides."""
    parts = (make_fingerprint(scenario), make_fingerprint(constraints), __version__, *read_sources())
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def _read(file: Path, scenario: Scenario) -> tuple[Plan, str] | None:
    """Read a cached plan and its description; None where there is none that can be used."""
    try:
        first = file.read_text(encoding="utf-8").partition("\n")[0]
        plan = Plan.load(file, scenario.graph)
        plan.check(scenario.graph, {role: model.shape for role, model in scenario.models.items()})
    except (OSError, UnicodeDecodeError, UserError):
        return None
    usable = first.startswith(_HEADER) and plan.cluster == scenario.spec.cluster
    return (plan, first.removeprefix(_HEADER)) if usable else None


_HEADER = "# realrl plan: "


def _write(file: Path, found: SearchedPlan, scenario: Scenario) -> str:
    """Cache a plan atomically; return a description of its place."""
    calls = ", ".join(call.name for call in scenario.graph.calls)
    made = datetime.now(UTC).date().isoformat()
    text = (
        f"{_HEADER}{found.about}\n"
        f"# {calls} on {scenario.spec.name}, by realrl {__version__} on {made}\n"
        f"{found.plan.to_text(scenario.graph)}"
    )
    try:
        write_whole(file, text)
    except OSError as error:
        return f"not kept, since {file.parent} cannot be written ({reason_of(error)})"
    return f"kept in {file}"
