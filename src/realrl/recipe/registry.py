"""Finding algorithms: installed ones by name, a user's own by file or module."""

from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from realrl.config.errors import UserError
from realrl.config.explain import brief, nearest
from realrl.config.user_code import UserCode
from realrl.recipe.algorithm import AlgorithmSpec

GROUP = "realrl.algorithms"
"""Entry points of this group are descriptions of algorithms, each by the name it has in recipes."""


def algorithm_names() -> list[str]:
    """Names of the installed algorithms."""
    return sorted(_installed())


def find_algorithm(reference: Any) -> tuple[AlgorithmSpec, str]:
    """The description that a recipe's `algorithm` refers to, and the reference as it is kept: a path is absolute.

    UserError, naming what there is, where nothing is found; UserCodeError where code cannot be imported.
    """
    if isinstance(reference, str) and reference in _installed():
        return _load(_installed()[reference]), reference
    if not isinstance(reference, str) or "." not in reference:
        hint = nearest(str(reference), algorithm_names())
        raise UserError(
            f"algorithm: {brief(reference)} is not {describe_choices()}"
            + (f"; did you mean {hint}?" if hint else "")
        )
    code = UserCode("algorithm", reference)
    values = vars(code.module).values()
    specs = list({id(value): value for value in values if isinstance(value, AlgorithmSpec)}.values())
    where = code.file or reference
    if len(specs) != 1:
        found = ", ".join(spec.name for spec in specs) or "none"
        raise UserError(f"algorithm={reference}: {where} must hold one AlgorithmSpec (it has {found})")
    return specs[0], str(code.file) if reference.endswith(".py") else reference


def describe_choices() -> str:
    """What `algorithm` may be, for error messages."""
    return f"one of {', '.join(algorithm_names())}, or a FILE.py or package.module that describes one"


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
