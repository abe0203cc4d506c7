"""Registry of algorithms: installed ones by name, a user's own by file or module."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, wraps
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from realrl.config.errors import UserError
from realrl.config.explain import brief, nearest
from realrl.config.user_code import UserCode, is_own_module
from realrl.config.words import join
from realrl.recipe.algorithm import AlgorithmSpec

GROUP = "realrl.algorithms"
"""Entry points of this group are descriptions of algorithms, each by the name it has in recipes."""

ATTRIBUTE = "ALGORITHM"
"""Name of the description in a user's file or module."""


def list_algorithms() -> list[str]:
    """List the names of installed algorithms."""
    return sorted(_installed())


def find_algorithm(reference: Any) -> tuple[AlgorithmSpec, str]:
    """Find what a recipe's `algorithm` refers to, of a file or module its `ALGORITHM`; also the reference as it is
    kept, in which a path is absolute.

    UserError, naming what there is, where nothing is found; UserCodeError where code cannot be imported.
    """
    if isinstance(reference, str) and reference in _installed():
        return _load(_installed()[reference]), reference
    if not _is_module(reference):
        hint = nearest(str(reference), list_algorithms())
        raise UserError(
            f"algorithm: {brief(reference)} is not {describe_choices()}"
            + (f"; did you mean {hint}?" if hint else "")
        )
    code = UserCode("algorithm", reference)
    spec = vars(code.module).get(ATTRIBUTE)
    if not isinstance(spec, AlgorithmSpec):
        raise UserError(f"algorithm={reference}: {_describe_lack(code)}")
    return _with_errors(spec, code), str(code.file) if reference.endswith(".py") else reference


def find_user_code(reference: str) -> UserCode | None:
    """Import the code behind an `algorithm` that is not of this package, once per process; None for one that is."""
    point = _installed().get(reference)
    if point is None:
        return None if is_own_module(reference) else UserCode("algorithm", reference)
    return None if is_own_module(point.module) else UserCode("algorithm", point.module)


def _describe_lack(code: UserCode) -> str:
    """Describe what a module has instead of an `ALGORITHM` that is an AlgorithmSpec."""
    values = vars(code.module)
    where = code.file or code.module.__name__
    has = f"its {ATTRIBUTE} is no AlgorithmSpec" if ATTRIBUTE in values else f"it has no {ATTRIBUTE}"
    others = [name for name, value in values.items() if isinstance(value, AlgorithmSpec)]
    hint = (
        f"; there {'is' if len(others) == 1 else 'are'} {join(others)}, which may be renamed"
        if others
        else ""
    )
    return f"{where} must hold an AlgorithmSpec named {ATTRIBUTE}, and {has}{hint}"


def _with_errors(spec: AlgorithmSpec, code: UserCode) -> AlgorithmSpec:
    """Let errors of a description's functions name the line of the user's code."""

    def guard(field: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*arguments: Any) -> Any:
            with code.errors(f"raised in {field}:", passing=(UserError,)):
                return function(*arguments)

        return call

    given = spec.given_functions
    return replace(spec, **{field: guard(field, function) for field, function in given.items()})  # type: ignore[arg-type]


def _is_module(reference: Any) -> bool:
    """Whether a reference has the form FILE.py or package.module."""
    if not isinstance(reference, str):
        return False
    parts = reference.split(".")
    return reference.endswith(".py") or (len(parts) > 1 and all(part.isidentifier() for part in parts))


def describe_choices() -> str:
    """Describe the values that `algorithm` may have, for error messages."""
    names = ", ".join(list_algorithms()) or "the installed algorithms (there are none: install realrl again)"
    return f"one of {names}, or a FILE.py or package.module that describes one"


@cache
def _installed() -> dict[str, EntryPoint]:
    """Installed algorithms by name; UserError where two packages use one name."""
    found: dict[str, EntryPoint] = {}
    for point in entry_points(group=GROUP):
        if point.name in found:
            packages = " and ".join(sorted(_package(p) for p in (found[point.name], point)))
            raise UserError(f"algorithm {point.name} is in two packages, {packages}; uninstall one")
        found[point.name] = point
    return found


def _load(point: EntryPoint) -> AlgorithmSpec:
    try:
        spec = point.load()
    except Exception as error:
        raise UserError(
            f"algorithm {point.name} of package {_package(point)} cannot be imported:"
            f" {type(error).__name__}: {error}"
        ) from error
    if not isinstance(spec, AlgorithmSpec) or spec.name != point.name:
        raise UserError(
            f"algorithm {point.name} of package {_package(point)}: {point.value} is no AlgorithmSpec of that name"
        )
    return spec


def _package(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else "unknown"
