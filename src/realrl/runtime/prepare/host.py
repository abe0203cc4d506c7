"""Find the memory and the cores that processes may use on this machine. Does not import torch."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

from realrl.config.errors import UserError
from realrl.config.values import format_bytes

_CONTROL_GROUPS, _OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def host_memory(groups: Path = _CONTROL_GROUPS, own: Path = _OWN_GROUPS) -> int:
    """Return the bytes of memory that containers and batch systems allow this process and its peers.

    `groups` is Linux's directory of control groups. `own` is the file that names the groups of this process.
    """
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *(limit for limit, _ in _limits(groups, own))])


def free_group_memory(groups: Path = _CONTROL_GROUPS, own: Path = _OWN_GROUPS) -> int | None:
    """Return the bytes of memory that control groups (see `host_memory`) still allow; None without a limit."""
    return min((max(0, limit - used) for limit, used in _limits(groups, own)), default=None)


def cpu_quota(groups: Path = _CONTROL_GROUPS, own: Path = _OWN_GROUPS) -> float | None:
    """Return the number of cores that control groups allow this process and its peers; None without a limit."""
    quotas = []
    for group, controllers in _own_groups(groups, own):
        if controllers == "":
            quota, _, period = _read(group / "cpu.max").partition(" ")
        elif "cpu" in controllers.split(","):
            quota, period = _read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us")
        else:
            continue
        if quota.isdigit() and period.isdigit():
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def free_group_threads(groups: Path = _CONTROL_GROUPS, own: Path = _OWN_GROUPS) -> int | None:
    """Return how many more threads and processes control groups allow; None without a limit."""
    left = []
    for group, controllers in _own_groups(groups, own):
        if controllers == "" or "pids" in controllers.split(","):
            most, used = _read(group / "pids.max"), _read(group / "pids.current")
            if most.isdigit() and used.isdigit():
                left.append(int(most) - int(used))
    return min(left, default=None)


def count_cores() -> int:
    """Count the cores that this process and its peers may keep busy, at least one."""
    seen = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    quota = cpu_quota()
    return seen if quota is None else max(1, min(seen, int(quota)))


def count_threads(processes: int) -> int:
    """Return the number of threads for each of `processes` processes on this machine.

    The processes share the cores evenly, unless OMP_NUM_THREADS, which torch reads, sets the number.
    """
    given = os.environ.get("OMP_NUM_THREADS", "")
    return int(given) if given.isdecimal() and int(given) > 0 else max(1, count_cores() // processes)


_BARE_PROCESS = 400 << 20
"""Resident bytes of a process that has loaded torch but no model; measured 380 to 490 MiB."""


def describe_crowd(processes: int) -> str | None:
    """Describe the problem if there are more processes than cores; None if there are enough cores.

    Raises UserError if memory is too small even for processes without models.
    """
    cores, memory = count_cores(), host_memory()
    if processes * _BARE_PROCESS > memory:
        raise UserError(
            f"{processes} processes on this machine take {format_bytes(processes * _BARE_PROCESS)} for libraries"
            f" alone, of {format_bytes(memory)}; make the cluster smaller, such as cluster=1x{cores} for its"
            f" {cores} cores"
        )
    if processes <= cores:
        return None
    shared = "1 core" if cores == 1 else f"{cores} cores"
    return f"{processes} processes share {shared}, so steps take longer than with cluster=1x{cores}"


def _limits(groups: Path, own: Path) -> Iterator[tuple[int, int]]:
    """Yield limit and used bytes of every control group of this process that has a limit.

    Cached pages of files do not count as used, because the system drops them when it needs memory.
    """
    for group, controllers in _own_groups(groups, own):
        if controllers == "":
            names = ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        limit = _read(group / names[0])
        if limit.isdigit():
            counts = dict(line.split(" ", 1) for line in _read(group / "memory.stat").splitlines())
            used = int(_read(group / names[1]) or 0) - int(counts.get(names[2], 0))
            yield int(limit), max(0, used)


def _own_groups(groups: Path, own: Path) -> Iterator[tuple[Path, str]]:
    """Yield the control groups of this process and their parents, each with its controllers.

    Groups of the unified hierarchy have all controllers and name none. An older hierarchy is in a directory that is
    named after all its controllers, or after one of them.
    """
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        inside = Path(path.lstrip("/"))
        for top in [groups] if controllers == "" else [groups / name for name in controllers.split(",")]:
            for group in (inside, *inside.parents):
                yield top / group, controllers


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
