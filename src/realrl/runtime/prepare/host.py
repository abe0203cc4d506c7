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
    return min([physical, *_limits(groups, own)])


def _limits(groups: Path, own: Path) -> Iterator[int]:
    """List the limits of every control group of this process, parents included."""
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, name = groups, "memory.max"
        elif "memory" in controllers.split(","):
            top, name = groups / "memory", "memory.limit_in_bytes"
        else:
            continue
        inside = Path(path.lstrip("/"))
        for group in (inside, *inside.parents):
            try:
                limit = (top / group / name).read_text(encoding="utf-8").strip()
            except OSError:
                continue
            if limit.isdigit():
                yield int(limit)
