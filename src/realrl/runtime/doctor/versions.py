"""Versions of what is installed. No torch."""

import hashlib
import platform
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet

from realrl.runtime.doctor.finding import Finding, ok, problem, warning

_REQUIREMENT = re.compile(r"([\w.-]+)(?:\[[\w,.-]*\])?\s*([^;]*)(?:;\s*(.*))?")
_EXTRA = re.compile(r"extra\s*==\s*['\"]([\w-]+)['\"]")
_SAME = {
    "realrl": problem,
    "torch": problem,
    "cuda": problem,
    "nccl": problem,
    "Python": warning,
    "transformers": warning,
}
"""What has to be the same on all nodes, and what a difference is."""
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


def list_versions() -> dict[str, str]:
    """List the versions of this machine that must be those of all nodes, by what they are of."""
    digest = hashlib.sha256()
    root = Path(__file__).parents[2]
    for file in sorted(root.rglob("*.py")):
        digest.update(str(file.relative_to(root)).encode() + file.read_bytes())
    return {
        "realrl": f"{_find(version, 'realrl')} (code {digest.hexdigest()[:8]})",
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "transformers": str(_find(version, "transformers")),
    }


def compare_nodes(nodes: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """Compare what nodes have: `list_versions`, `describe_torch` and `host` of each."""
    for name, make in _SAME.items():
        found: dict[str, list[str]] = {}
        for node in nodes:
            found.setdefault(str(node[name]), []).append(node["host"])
        if len(found) > 1:
            listed = "; ".join(
                f"{value} on {', '.join(dict.fromkeys(hosts))}" for value, hosts in found.items()
            )
            yield make(
                "versions", f"nodes have different versions of {name}: {listed}; install the same on all"
            )
    counts = {(len(node["devices"]), node["host"]) for node in nodes}
    if len({count for count, _ in counts}) > 1:
        listed = ", ".join(f"{count} on {host}" for count, host in sorted(counts))
        yield problem("GPUs", f"nodes have different numbers of GPUs: {listed}")


def _find(find: Callable[[str], str], name: str) -> str | None:
    try:
        return find(name)
    except PackageNotFoundError:
        return None


def _misses(have: str, wanted: str) -> bool:
    """Tell whether a version does not satisfy bounds such as `>=2.11,<2.14`."""
    return not SpecifierSet(wanted.strip("() ")).contains(have, prereleases=True)
