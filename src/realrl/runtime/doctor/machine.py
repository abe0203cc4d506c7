"""Checks of this machine that need no other process: versions, GPUs, limits and disk. Does not import torch."""

import csv
import hashlib
import os
import platform
import resource
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any, Literal

from packaging.requirements import Requirement

from realrl.config.errors import UserError
from realrl.config.files import reason_of
from realrl.config.hardware import find_missing_build_tool
from realrl.config.redaction import redact
from realrl.config.values import format_bytes
from realrl.runtime.prepare.host import describe_crowd, free_group_threads

Status = Literal["ok", "warning", "problem", "unknown"]
"""`problem`: a run will fail or lose something. `warning`: a run may fail or be slow. `unknown`: the check
failed."""


@dataclass(frozen=True)
class Finding:
    """Result of a check. Its text names the fault and the remedy, if there is a fault."""

    subject: str
    status: Status
    text: str
    node: str = ""
    """Host to which the finding applies, if several nodes are examined."""


Said = Iterator[tuple[Status, str]]
"""Statuses and texts that a check yields. A UserError that the check raises counts as a problem."""


def run_checks(
    checks: Sequence[tuple[str, Callable[[], Iterable[tuple[Status, str]] | None]]], seconds: float
) -> list[Finding]:
    """Run checks in threads, so that a check that fails or hangs does not stop the other checks.

    `checks`: pairs (subject of the findings, check). `seconds`: time limit for all checks together.
    """
    found: list[list[Finding]] = [[] for _ in checks]

    def run(place: int) -> None:
        subject, check = checks[place]
        try:
            for status, text in check() or ():
                found[place].append(Finding(subject, status, redact(text)))
        except UserError as error:
            found[place].append(Finding(subject, "problem", redact(str(error))))
        except Exception as error:
            text = f"this check failed: {type(error).__name__}: {' '.join(str(error).split())}"
            found[place].append(Finding(subject, "unknown", redact(text)))

    threads = [threading.Thread(target=run, args=(place,), daemon=True) for place in range(len(checks))]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + seconds
    for place, thread in enumerate(threads):
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            text = f"this check did not end within {seconds:g} s"
            found[place].append(Finding(checks[place][0], "unknown", text))
    return [finding for findings in found for finding in findings]


def check_versions() -> Said:
    """Compare the versions of installed packages with the requirements of this package."""
    for text in requires("realrl") or ():
        requirement = Requirement(text)
        name, wanted, have = requirement.name, requirement.specifier, _find_version(requirement.name)
        # Skip requirements for other systems, and for extras, which the checks of a recipe cover.
        if requirement.marker is not None and not requirement.marker.evaluate():
            continue
        if have is None:
            yield "problem", f"{name} is not installed; run pip install '{name}{wanted}'"
        elif not wanted.contains(have, prereleases=True):
            yield "warning", f"{name} is {have}, and {wanted} is needed; run pip install '{name}{wanted}'"
    shown = ", ".join(f"{name} {_find_version(name)}" for name in ("realrl", "torch", "transformers"))
    yield "ok", f"Python {platform.python_version()}, {shown}"


def _find_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def describe_node(torch: Mapping[str, Any]) -> dict[str, str]:
    """Describe the properties that all nodes must share. `torch`: the result of `describe_torch`."""
    digest = hashlib.sha256()
    root = Path(__file__).parents[2]
    for file in sorted(root.rglob("*.py")):
        digest.update(str(file.relative_to(root)).encode() + file.read_bytes())
    return {
        "realrl": f"{_find_version('realrl')} (code {digest.hexdigest()[:8]})",
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "transformers": str(_find_version("transformers")),
        "GPUs": str(len(torch["devices"])),
        **{name: str(torch[name]) for name in ("torch", "cuda", "nccl")},
    }


def compare_nodes(nodes: Mapping[str, Mapping[str, str]]) -> Said:
    """Compare what `describe_node` returned on each host."""
    for name in next(iter(nodes.values())):
        hosts: dict[str, list[str]] = {}
        for host, node in nodes.items():
            hosts.setdefault(node[name], []).append(host)
        if len(hosts) > 1:
            listed = "; ".join(f"{value} on {', '.join(on)}" for value, on in hosts.items())
            status: Status = "warning" if name in ("Python", "transformers") else "problem"
            yield status, f"nodes differ in {name}: {listed}; make them alike"


_QUERY = (
    *("index", "name", "driver_version", "memory.total", "memory.used"),
    *("ecc.errors.uncorrected.volatile.total", "mig.mode.current"),
)


def list_gpus(environment: Mapping[str, str] = os.environ) -> list[dict[str, str]]:
    """Ask nvidia-smi for the GPUs that CUDA_VISIBLE_DEVICES allows.

    Returns a dict for each GPU, with the names in `_QUERY` as keys. The list is empty without nvidia-smi. Raises
    UserError if the driver does not answer.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5.0, check=False)
        if done.returncode:
            raise OSError(f"nvidia-smi ended with status {done.returncode}: {done.stdout + done.stderr:.200}")
        rows = csv.reader(done.stdout.splitlines(), skipinitialspace=True)
        gpus = [dict(zip(_QUERY, row, strict=True)) for row in rows]
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        advice = "load it (`nvidia-smi` must work), or reboot"
        raise UserError(f"the driver does not answer: {str(error).strip()}; {advice}") from None
    listed = [part.strip() for part in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if part.strip()]
    if "CUDA_VISIBLE_DEVICES" not in environment:
        return gpus
    if all(part.lstrip("-").isdecimal() for part in listed):
        return [gpu for gpu in gpus if gpu["index"] in listed]
    # The variable may name GPUs by UUID, which the query does not request, so only their number counts.
    return gpus[: len(listed)]


def check_gpus(gpus: Sequence[Mapping[str, str]], driver_error: str = "") -> Said:
    """Look for memory errors, MIG slices, memory that other programs use, and the tools that Triton needs to launch
    kernels."""
    if driver_error:
        yield "problem", driver_error
    if gpus:
        names, first = ", ".join(sorted({gpu["name"] for gpu in gpus})), gpus[0]
        yield "ok", f"{len(gpus)} x {names}, {first['memory.total']} MiB, driver {first['driver_version']}"
    for gpu in gpus:
        # nvidia-smi prints memory in MiB, and `[N/A]` for a figure that a GPU does not have.
        used, total, errors = (int(gpu[name]) if gpu[name].isdecimal() else 0 for name in _FIGURES)
        name = f"GPU {gpu['index']}"
        if errors:
            yield "problem", f"{name} has {errors} uncorrected memory errors; reset it, or leave it out"
        if gpu["mig.mode.current"] == "Enabled":
            yield "warning", f"{name} is cut into MIG slices, which cannot use NCCL; turn MIG off"
        if used > 0.05 * total:
            text = f"{format_bytes(used << 20)} of {format_bytes(total << 20)} of {name} are in use"
            yield "warning", f"{text}; end what uses them (see `nvidia-smi`)"
    missing = find_missing_build_tool() if gpus else None
    if missing is not None:
        yield "problem", missing


_FIGURES = ("memory.used", "memory.total", "ecc.errors.uncorrected.volatile.total")


def check_limits(ranks: int, world: int, gpus: int, root: Path = Path("/")) -> Said:
    """Compare limits of this machine with what its ranks may need.

    `ranks`: number of processes on this machine. `world`: number of all processes of the run. `root`: root of the
    file system, which tests replace.
    """
    crowd = describe_crowd(ranks)
    if crowd is not None:
        yield "warning", crowd
    locked, adapters = _soft_limit(resource.RLIMIT_MEMLOCK), root / "sys/class/infiniband"
    if locked is not None and adapters.is_dir() and any(adapters.iterdir()):
        text = f"{format_bytes(locked)} may be locked in memory, and InfiniBand needs more"
        yield "warning", f"{text}; raise it (ulimit -l unlimited)"
    shared, free = root / "dev/shm", _count_free(root / "dev/shm")
    # NCCL uses up to 128 MiB of shared memory for each GPU.
    if gpus > 1 and free < gpus << 27:
        text = f"{format_bytes(free)} are free in {shared}, and NCCL may need {format_bytes(gpus << 27)}"
        yield "problem", f"{text}; start the container with --shm-size=8g or --ipc=host"
    files, processes = _soft_limit(resource.RLIMIT_NOFILE), _soft_limit(resource.RLIMIT_NPROC)
    further = free_group_threads(root / "sys/fs/cgroup", root / "proc/self/cgroup")
    rows = (
        ("open files", files, 512 + 64 * world, "ulimit -n 65536"),
        ("processes and threads", processes, 256 * ranks, "ulimit -u"),
        ("more of them in the control group", further, 256 * ranks, "--pids-limit, podPidsLimit, TasksMax"),
    )
    for what, have, need, remedy in rows:
        if have is not None and have < need:
            # The estimated needs are generous, so a run with a little less may work.
            status: Status = "problem" if 4 * have < need else "warning"
            yield status, f"{have} {what}, and {ranks} ranks of {world} may need {need}; raise it ({remedy})"
    yield "ok", ", ".join(f"{'any' if have is None else have} {what}" for what, have, *_ in rows)


def _soft_limit(kind: int) -> int | None:
    """Return a limit of this process; None if it is unlimited."""
    limit = resource.getrlimit(kind)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def _count_free(folder: Path) -> int:
    """Count the free bytes of a file system; 0 if the folder does not exist."""
    if not folder.is_dir():
        return 0
    room = os.statvfs(folder)
    return room.f_bavail * room.f_frsize


def check_disk(run_dir: Path, need: int | None) -> Said:
    """Try to write into the directory of the run, and measure free space and speed. Leaves no file behind.

    `need`: size of a checkpoint in bytes; None if it is unknown.
    """
    nearest = next(folder for folder in (run_dir, *run_dir.absolute().parents) if folder.exists())
    if not nearest.is_dir():
        raise UserError(f"{nearest} is a file; choose another run_dir")
    try:
        speed = _measure_writing(nearest)
    except OSError as error:
        text = f"{run_dir} cannot be written: {reason_of(error)}; choose another run_dir"
        raise UserError(text) from None
    free = _count_free(nearest)
    text = f"{format_bytes(free)} are free, written at {format_bytes(speed)}/s"
    if need is None:
        if free < 1 << 30:
            yield "warning", f"{text}; name a recipe to compare with its needs"
        yield "ok", text
        return
    size = format_bytes(need)
    if free < 2 * need:
        advice = "one is kept until the next is whole; make room, or choose another run_dir"
        yield "problem", f"{text}, and two checkpoints of {size} must fit: {advice}"
    if need / speed > 300:
        advice = "choose a faster file system, or save less often"
        yield "warning", f"a checkpoint of {size} takes {need / speed / 60:.0f} minutes; {advice}"
    yield "ok", f"{text}; a checkpoint needs {size}"


def _measure_writing(folder: Path) -> float:
    """Return the speed of writing in bytes per second.

    Writes a temporary file of 64 MiB, or for 2 s if that is shorter. The time includes the flush to the disk.
    """
    part = os.urandom(4 << 20)
    with tempfile.NamedTemporaryFile(dir=folder, buffering=0) as file:
        start, written = time.monotonic(), 0
        while written < 64 << 20 and time.monotonic() < start + 2:
            written += file.write(part)
        os.fsync(file.fileno())
        return written / max(time.monotonic() - start, 1e-6)
