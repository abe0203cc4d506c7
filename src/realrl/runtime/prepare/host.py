"""Memory of this machine that its processes may use. No torch."""

import os
from collections.abc import Iterator
from pathlib import Path

_CONTROL_GROUPS, _OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def host_memory(groups: Path = _CONTROL_GROUPS, own: Path = _OWN_GROUPS) -> int:
    """Find the bytes of memory that containers and batch systems leave to this process and its peers.

    `groups` is where Linux says what control groups may use, `own` the file that names those of this process.
    """
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *(limit for limit, _ in _limits(groups, own))])


def free_group_memory(groups: Path = _CONTROL_GROUPS, own: Path = _OWN_GROUPS) -> int | None:
    """Find the bytes that control groups have left, see `host_memory`; None where none has a limit."""
    return min((max(0, limit - used) for limit, used in _limits(groups, own)), default=None)


def _limits(groups: Path, own: Path) -> Iterator[tuple[int, int]]:
    """List (limit, used) of every control group of this process that has a limit, parents included.

    Pages of files that were read once are not counted as used: they are given up when memory is needed.
    """
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, names = groups, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            top = groups / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        inside = Path(path.lstrip("/"))
        for group in (inside, *inside.parents):
            limit = _read(top / group / names[0])
            if limit.isdigit():
                counts = dict(line.split(" ", 1) for line in _read(top / group / "memory.stat").splitlines())
                used = int(_read(top / group / names[1]) or 0) - int(counts.get(names[2], 0))
                yield int(limit), max(0, used)


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
