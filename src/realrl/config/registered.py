"""Named algorithms and families, built-in or added by other packages through entry points. Imported when used."""

from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from realrl.config.errors import UserError

_PACKAGE = "realrl"


def find_registered(kind: str, group: str, built_in: Mapping[str, str]) -> dict[str, EntryPoint]:
    """Find the entries of `built_in` (name -> "module:ATTRIBUTE") and of other packages' entry points.

    Raises UserError if two entries have the same name.
    """
    found = {name: EntryPoint(name, value, group) for name, value in built_in.items()}
    for point in entry_points(group=group):
        # The metadata of an older installation may still declare built-in entries.
        if name_package(point) == _PACKAGE:
            continue
        if point.name in built_in:
            raise UserError(
                f"{kind} {point.name} of package {name_package(point)} ({point.value}) has the name of the"
                f" built-in {built_in[point.name]}; rename it there, or uninstall {name_package(point)}"
            )
        if point.name in found:
            packages = " and ".join(sorted(name_package(p) for p in (found[point.name], point)))
            raise UserError(f"{kind} {point.name} is in two packages, {packages}; uninstall one")
        found[point.name] = point
    return found


def load_registered(kind: str, point: EntryPoint) -> Any:
    """Import the object of an entry. Raises UserError with the package's name if that fails."""
    try:
        return point.load()
    except Exception as error:
        raise UserError(
            f"{kind} {point.name} of package {name_package(point)} cannot be imported:"
            f" {type(error).__name__}: {error}"
        ) from error


def name_package(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else _PACKAGE
