"""Limits of this machine: cores, memory, shared memory, files and processes. No torch."""

import os
import resource
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from realrl.config.values import format_bytes
from realrl.runtime.doctor.finding import Finding, ok, problem, warning
from realrl.runtime.prepare.host import cpu_quota, free_group_memory, free_group_threads, host_memory

_MIB, _GIB = 1 << 20, 1 << 30
_PER_RANK = 512 * _MIB
"""Bytes of memory that a process takes before it holds any model: Python, torch and its threads."""
_SHARED_PER_GPU = 128 * _MIB
"""Bytes of shared memory that NCCL may want for each GPU of a node."""


@dataclass(frozen=True)
class Host:
    """Places where Linux tells of its limits; others in tests."""

    proc: Path = Path("/proc")
    cgroup: Path = Path("/sys/fs/cgroup")
    sys: Path = Path("/sys")
    shared: Path = Path("/dev/shm")
    limit: Callable[[int], tuple[int, int]] = field(default=resource.getrlimit)

    def read(self, path: Path) -> str | None:
        """Read a short file; None where it cannot be read."""
        try:
            return path.read_text(encoding="utf-8").strip()
        except (OSError, ValueError):
            return None


def check_cores(
    ranks: int, host: Host, cores: int | None = None, threads: str | None = None
) -> Iterator[Finding]:
    """Compare the cores that this process may use with its ranks, and with the quota of its control group.

    threads: OMP_NUM_THREADS, if it is set.
    """
    if cores is None:
        cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    quota = cpu_quota(host.cgroup, host.proc / "self" / "cgroup")
    usable = cores if quota is None else min(cores, quota)
    few = threads is not None and threads.isdecimal() and int(threads) * ranks <= usable
    if quota is not None and quota < cores and not few:
        yield warning(
            "cores",
            f"the control group allows {quota:g} of the {cores} cores that are seen, so that threads wait for each"
            f" other; set OMP_NUM_THREADS={max(1, int(quota / ranks))}, or raise the limit (--cpus)",
        )
    if ranks > usable:
        yield warning("cores", f"{ranks} processes share {usable:g} cores; make the cluster smaller")
    else:
        yield ok("cores", f"{usable:g} cores for {ranks} process{'es' * (ranks > 1)}")


def check_memory(ranks: int, host: Host) -> Iterator[Finding]:
    """Compare free memory and the limits of control groups with what processes take before any model is loaded."""
    meminfo = _read_meminfo(host)
    total, free = meminfo.get("MemTotal"), meminfo.get("MemAvailable")
    groups = (host.cgroup, host.proc / "self" / "cgroup")
    limit, left = host_memory(*groups), free_group_memory(*groups)
    limited = total is not None and limit < total
    if limited and left is not None:
        free = left if free is None else min(free, left)
    if free is not None and free < ranks * _PER_RANK:
        yield problem(
            "memory",
            f"{format_bytes(max(0, free))} are free, and {ranks} processes take about"
            f" {format_bytes(ranks * _PER_RANK)} before they hold a model; end other programs, or use another"
            " machine",
        )
    if host.read(host.proc / "sys" / "vm" / "overcommit_memory") == "2":
        room = meminfo.get("CommitLimit", 0) - meminfo.get("Committed_AS", 0)
        yield warning(
            "memory",
            f"vm.overcommit_memory=2 refuses reservations beyond {format_bytes(max(0, room))}, of which CUDA and"
            " threads make many; set it to 0",
        )
    pages = host.read(host.sys / "kernel" / "mm" / "transparent_hugepage" / "enabled")
    huge = f"; transparent huge pages: {pages.split('[')[1].split(']')[0]}" if pages and "[" in pages else ""
    if free is not None:
        group = ", the limit of a control group, beyond which processes are killed" if limited else ""
        size = format_bytes(min(limit, total or limit))
        yield ok("memory", f"{format_bytes(max(0, free))} free of {size}{group}{huge}")


def check_shared_memory(gpus: int, host: Host) -> Iterator[Finding]:
    """Check that /dev/shm has room for the buffers by which GPUs of a machine exchange data."""
    try:
        found = os.statvfs(host.shared)
    except OSError:
        text = f"{host.shared} is missing"
        yield (
            problem("shared memory", f"{text}; NCCL needs it; mount a tmpfs there")
            if gpus > 1
            else ok("shared memory", f"{text}, and CPU processes do not need it")
        )
        return
    size, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    need = gpus * _SHARED_PER_GPU if gpus > 1 else 0
    if free < need:
        yield problem(
            "shared memory",
            f"{host.shared} has {format_bytes(free)} free, and NCCL may need {format_bytes(need)} for {gpus} GPUs;"
            " start the container with --shm-size=8g or --ipc=host",
        )
    else:
        yield ok("shared memory", f"{host.shared} has {format_bytes(free)} free of {format_bytes(size)}")


def check_limits(ranks: int, world: int, host: Host) -> Iterator[Finding]:
    """Check the limits on open files, processes and locked memory of this process."""
    files, hard = host.limit(resource.RLIMIT_NOFILE)
    need = 512 + 64 * world
    if _below(files, need):
        raise_it = "ulimit -n 65536" if not _below(hard, need) else "LimitNOFILE, or nofile in limits.conf"
        yield (problem if _below(files, 128 + 8 * world) else warning)(
            "limits", f"{files} files may be open, and {world} ranks may need {need}; raise it ({raise_it})"
        )
    processes, _ = host.limit(resource.RLIMIT_NPROC)
    if _below(processes, 256 * ranks):
        yield warning(
            "limits",
            f"{processes} processes and threads are allowed, and {ranks} ranks may have {256 * ranks};"
            " raise it (ulimit -u)",
        )
    further = free_group_threads(host.cgroup, host.proc / "self" / "cgroup")
    if further is not None and further < 256 * ranks:
        yield warning(
            "limits",
            f"a control group allows {further} more processes and threads, and {ranks} ranks may have"
            f" {256 * ranks}; raise it (--pids-limit, podPidsLimit of Kubernetes, TasksMax of systemd)",
        )
    locked, _ = host.limit(resource.RLIMIT_MEMLOCK)
    adapters = host.sys / "class" / "infiniband"
    if adapters.is_dir() and any(adapters.iterdir()) and locked != resource.RLIM_INFINITY:
        yield warning(
            "limits",
            f"{format_bytes(locked)} may be locked in memory, and InfiniBand needs more: NCCL falls back or fails;"
            " raise it (ulimit -l unlimited)",
        )
    space, _ = host.limit(resource.RLIMIT_AS)
    if space != resource.RLIM_INFINITY:
        yield warning(
            "limits",
            f"a process may reserve {format_bytes(space)} of addresses, and CUDA reserves far more;"
            " lift it (ulimit -v unlimited)",
        )
    yield ok(
        "limits",
        f"open files {_say(files)}, processes {_say(processes)}, locked memory {_say(locked, size=True)}",
    )


def _below(limit: int, need: int) -> bool:
    return limit != resource.RLIM_INFINITY and limit < need


def _say(limit: int, *, size: bool = False) -> str:
    if limit == resource.RLIM_INFINITY:
        return "unlimited"
    return format_bytes(limit) if size else str(limit)


def _read_meminfo(host: Host) -> dict[str, int]:
    """Read bytes by name."""
    lines = (host.read(host.proc / "meminfo") or "").splitlines()
    pairs = (line.split(":", 1) for line in lines if ":" in line)
    return {name: int(rest.split()[0]) * 1024 for name, rest in pairs if rest.split()}
