"""Versions of what is installed. No torch."""

import platform
import re
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, requires, version

from realrl.runtime.doctor.finding import Finding, ok, problem, warning

_REQUIREMENT = re.compile(r"([\w.-]+)(?:\[[\w,.-]*\])?\s*([^;]*)(?:;\s*(.*))?")
_EXTRA = re.compile(r"extra\s*==\s*['\"]([\w-]+)['\"]")
_SHOWN = ("torch", "transformers", "datasets")


def check_versions(
    requirements: Sequence[str] | None = None, find: Callable[[str], str] = version
) -> Iterator[Finding]:
    """Compare what is installed with what this package needs, and list its extras that are complete.

    `requirements`: those of the package where none are given; `find`: gives the version of a distribution.
    """
    listed = requires("realrl") or [] if requirements is None else requirements
    extras: dict[str, bool] = {}
    for requirement in listed:
        match = _REQUIREMENT.match(requirement)
        if match is None:
            continue
        name, wanted, marker = match[1], match[2].strip(), match[3] or ""
        extra = _EXTRA.search(marker)
        have = _find(find, name)
        if extra is not None:
            extras[extra[1]] = extras.get(extra[1], True) and have is not None and not _misses(have, wanted)
        elif have is None:
            yield problem("versions", f"{name} is not installed; run pip install '{name}{wanted}'")
        elif _misses(have, wanted):
            yield warning(
                "versions",
                f"{name} {have} is installed, and {wanted} is needed; run pip install '{name}{wanted}'",
            )
    shown = ", ".join(f"{name} {_find(find, name)}" for name in ("realrl", *_SHOWN) if _find(find, name))
    complete = ", ".join(sorted(name for name, there in extras.items() if there)) or "none"
    yield ok("versions", f"Python {platform.python_version()}, {shown}; extras: {complete}")


def _find(find: Callable[[str], str], name: str) -> str | None:
    try:
        return find(name)
    except PackageNotFoundError:
        return None


def _misses(have: str, wanted: str) -> bool:
    """Tell whether a version does not satisfy bounds such as `>=2.11,<2.14`."""
    for bound in filter(None, (part.strip() for part in wanted.strip("() ").split(","))):
        match = re.fullmatch(r"(>=|<=|==|<|>)\s*([\d.]+)", bound)
        if match is None:
            continue
        mine, limit = _numbers(have), _numbers(match[2])
        length = max(len(mine), len(limit))
        mine, limit = (numbers + (0,) * (length - len(numbers)) for numbers in (mine, limit))
        holds = {
            ">=": mine >= limit,
            "<=": mine <= limit,
            "==": mine == limit,
            "<": mine < limit,
            ">": mine > limit,
        }
        if not holds[match[1]]:
            return True
    return False


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text.partition("+")[0])[:3])
