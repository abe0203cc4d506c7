"""Cache plans of `plan: search` by a fingerprint of everything that a search depends on. Does not import torch."""

import hashlib
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime
from enum import Enum
from importlib.metadata import entry_points
from importlib.resources import as_file, files
from pathlib import Path
from types import FunctionType, ModuleType

from pydantic import BaseModel

from realrl import __version__
from realrl.config.errors import UserError
from realrl.config.files import reason_of, write_whole
from realrl.families import registry as families
from realrl.plan.cluster import Cluster
from realrl.plan.plan import Plan
from realrl.planner.cluster.cluster_spec import ClusterSpec
from realrl.planner.profile.profile import Profile
from realrl.planner.search.plan_search import UserConstraints
from realrl.planner.simulate.scenario import Scenario
from realrl.recipe import registry as algorithms
from realrl.recipe.experiment import Experiment
from realrl.runtime.prepare.devices import search_spec
from realrl.runtime.prepare.fit.changes import Draft
from realrl.runtime.prepare.fit.search import SearchedPlan, search_plan
from realrl.runtime.prepare.gpu import Here
from realrl.runtime.prepare.scenarios import Measured, read_constraints


def cached_plan(experiment: Experiment, spec: ClusterSpec, say: Callable[[str], None]) -> Plan:
    """Load the plan of an earlier search for the same step on the same devices, or search now and cache it.

    `say` is called with the origin of the plan and its predicted time. Raises UserError if no plan fits.
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


def search_for_plan(experiment: Experiment, cluster: Cluster, here: Here, say: Callable[[str], None]) -> Plan:
    """Find the plan of a recipe with `plan: search` like `cached_plan`, but try the recipe's functions first."""
    # This import needs torch. A search may take minutes, so broken functions are reported before it.
    from realrl.runtime.prepare.inputs import check_functions

    check_functions(experiment)
    return cached_plan(experiment, search_spec(experiment, cluster, here), say)


def plans_directory() -> Path:
    """Return the directory of cached plans."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "realrl" / "plans"


def make_plan_key(scenario: Scenario, constraints: UserConstraints) -> str:
    """Hash everything that a search depends on: the step, the constraints, and the code."""
    parts = (make_fingerprint(scenario), make_fingerprint(constraints), __version__, *read_sources())
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def _read(file: Path, scenario: Scenario) -> tuple[Plan, str] | None:
    """Read a cached plan and its description; None if there is no usable plan."""
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
    """Write a plan to the cache atomically. Returns a text that says where the plan is."""
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


def make_fingerprint(value: object) -> str:
    """Describe a value by its parts, as the same text in every process.

    Two values are equal if and only if their texts are equal.

    Parts are the fields of a dataclass or pydantic model, or the elements of a collection. A value of any other
    class is described by its attributes with the names of the constructor's parameters. Raises TypeError if such an
    attribute is missing.
    """
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return repr(value)
    if isinstance(value, Enum):
        return f"{_name_type(value)}.{value.name}"
    if is_dataclass(value):
        return _fingerprint_fields(value, (field.name for field in fields(value)))
    if isinstance(value, BaseModel):
        return _fingerprint_fields(value, type(value).model_fields)
    if isinstance(value, Mapping):
        items = sorted((make_fingerprint(key), make_fingerprint(item)) for key, item in value.items())
        return f"{{{', '.join(f'{key}: {item}' for key, item in items)}}}"
    if isinstance(value, Set):
        return f"{{{', '.join(sorted(map(make_fingerprint, value)))}}}"
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(make_fingerprint, value))}]"
    if inspect.isfunction(value) or inspect.isclass(value):
        return f"{value.__module__}.{value.__qualname__}"
    return _fingerprint_fields(value, inspect.signature(type(value)).parameters)


def _fingerprint_fields(value: object, names: Iterable[str]) -> str:
    parts = []
    for name in names:
        if not hasattr(value, name):
            raise TypeError(f"{_name_type(value)} keeps no {name}, which it is made with, as an attribute")
        parts.append(f"{name}={make_fingerprint(getattr(value, name))}")
    return f"{_name_type(value)}({', '.join(parts)})"


def _name_type(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


EXTENSIONS = (algorithms.GROUP, families.GROUP)
"""Groups of entry points through which other packages extend this one."""
_PACKAGES = {"site-packages", "dist-packages"}
"""Names of directories that contain installed packages."""


def read_sources() -> Iterator[str]:
    """Yield the text of all code and tables on which a plan may depend, in the same order in every process."""
    with as_file(files("realrl")) as package:
        for file in sorted([*package.rglob("*.py"), *package.rglob("*.json")]):
            yield file.read_text(encoding="utf-8")
        for file in _user_files(package.resolve()):
            yield f"{file}\n{file.read_text(encoding='utf-8')}"
    for group in EXTENSIONS:
        for point in sorted(entry_points(group=group)):
            version = point.dist.version if point.dist is not None else None
            yield f"{group} {point.name} {point.value} {version}"


def _user_files(package: Path) -> list[Path]:
    """List the files of other loaded modules that may affect plans: algorithms, families, and the modules that they
    import.

    An installed module counts only if it uses this package.
    """
    found = set()
    for module in list(sys.modules.values()):
        source = getattr(module, "__file__", None)
        if source is None or not source.endswith(".py"):
            continue
        if _is_installed(source) and not _extends(module):
            continue
        file = Path(source).resolve()
        if file.is_file() and not file.is_relative_to(package):
            found.add(file)
    return sorted(found)


def _is_installed(source: str) -> bool:
    """Return whether a source file belongs to Python or to an installed package, in any environment on the path."""
    prefixes = tuple(str(Path(prefix)) + os.sep for prefix in (sys.prefix, sys.base_prefix))
    return source.startswith(prefixes) or not _PACKAGES.isdisjoint(Path(source).parts)


def _extends(module: ModuleType) -> bool:
    """Return whether a module uses a class or function of this package."""
    # Do not use `isinstance`: it would call into lazy objects, which may warn or load something.
    definitions = [
        value for value in list(vars(module).values()) if issubclass(type(value), (type, FunctionType))
    ]
    return any(str(value.__module__).partition(".")[0] == "realrl" for value in definitions)
