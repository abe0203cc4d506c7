"""GPUs as their driver describes them, beside what torch finds. No torch."""

import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from realrl.config.hardware import find_missing_build_tool
from realrl.config.values import format_bytes
from realrl.runtime.doctor.finding import Finding, ok, problem, warning

SUBJECT = "GPUs"
_FIELDS = (
    "index",
    "name",
    "driver_version",
    "memory.total",
    "memory.used",
    "ecc.errors.uncorrected.volatile.total",
    "mig.mode.current",
    "persistence_mode",
    "clocks_throttle_reasons.hw_slowdown",
    "clocks_event_reasons.hw_slowdown",
)
"""Fields that are asked for; the last one is the newer name of the one before. Drivers may not know all."""
_UNKNOWN = re.compile(r'Field "([\w.]+)" is not a valid field')
_SECONDS = 5.0
_OCCUPIED = 0.05
"""Part of a GPU's memory that somebody else has to use to be worth a word."""


@dataclass(frozen=True, kw_only=True)
class DriverGpu:
    """A GPU as nvidia-smi lists it."""

    index: int
    name: str
    driver: str
    memory_bytes: int
    used_bytes: int
    ecc_errors: int
    mig: bool
    persistent: bool
    slowed: bool


def ask_driver() -> str | None:
    """Ask nvidia-smi; None where there is none. OSError and subprocess's errors where it fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    fields = list(_FIELDS)
    deadline = time.monotonic() + _SECONDS
    while True:
        command = [program, f"--query-gpu={','.join(fields)}", "--format=csv,nounits"]
        left = max(0.1, deadline - time.monotonic())
        done = subprocess.run(command, capture_output=True, text=True, timeout=left, check=False)
        if not done.returncode:
            return done.stdout
        said = (done.stdout + done.stderr).strip()
        unknown = _UNKNOWN.search(said)
        if unknown is None or unknown[1] not in fields:
            raise OSError(f"nvidia-smi ended with status {done.returncode}: {said[:200]}")
        fields.remove(unknown[1])


def parse_gpus(text: str) -> list[DriverGpu]:
    """Parse what nvidia-smi lists: a line of names, such as `memory.total [MiB]`, and one for each GPU.

    LookupError or ValueError for others.
    """
    lines = [[part.strip() for part in line.split(",")] for line in text.splitlines() if line.strip()]
    if not lines:
        return []
    names = [name.partition(" ")[0] for name in lines[0]]
    found = []
    for values in lines[1:]:
        given = dict(zip(names, values, strict=True))
        slowed = (value for name, value in given.items() if name.endswith(".hw_slowdown"))
        found.append(
            DriverGpu(
                index=int(given["index"]),
                name=given["name"],
                driver=given["driver_version"],
                memory_bytes=_number(given["memory.total"]) << 20,
                used_bytes=_number(given["memory.used"]) << 20,
                ecc_errors=_number(given.get("ecc.errors.uncorrected.volatile.total", "")),
                mig=given.get("mig.mode.current") == "Enabled",
                persistent=given.get("persistence_mode") != "Disabled",
                slowed="Active" in slowed,
            )
        )
    return found


def choose_visible(gpus: Sequence[DriverGpu], environment: Mapping[str, str]) -> Sequence[DriverGpu]:
    """Choose the GPUs that CUDA_VISIBLE_DEVICES leaves to this process.

    Of those that it names by UUID, only their number is right.
    """
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return gpus
    listed = {part.strip() for part in visible.split(",") if part.strip()}
    if all(part.lstrip("-").isdecimal() for part in listed):
        return [gpu for gpu in gpus if str(gpu.index) in listed]
    return gpus[: len(listed)]


def check_driver(
    ask: Callable[[], str | None] = ask_driver, environment: Mapping[str, str] = os.environ
) -> Iterator[Finding]:
    """Look at what the driver says of the GPUs that may be used: errors, slices, other users."""
    try:
        text = ask()
    except (OSError, subprocess.SubprocessError) as error:
        yield problem(
            SUBJECT, f"the driver does not answer: {error}; load it (`nvidia-smi` must work), or reboot"
        )
        return
    if text is None:
        return
    gpus = choose_visible(parse_gpus(text), environment)
    for gpu in gpus:
        where = f"GPU {gpu.index}"
        if gpu.ecc_errors:
            yield problem(
                SUBJECT, f"{where} has {gpu.ecc_errors} uncorrected memory errors; reset it, or leave it out"
            )
        if gpu.mig:
            yield warning(
                SUBJECT, f"{where} is cut into MIG slices, which cannot exchange data by NCCL; turn MIG off"
            )
        if gpu.slowed:
            yield warning(SUBJECT, f"{where} slows itself down (heat or power); check its cooling")
        if gpu.used_bytes > _OCCUPIED * gpu.memory_bytes:
            used, total = format_bytes(gpu.used_bytes), format_bytes(gpu.memory_bytes)
            yield warning(
                SUBJECT, f"{used} of {total} of {where} are in use; end what uses them (see `nvidia-smi`)"
            )
    if gpus and not all(gpu.persistent for gpu in gpus):
        yield warning(
            SUBJECT,
            "persistence mode is off, so that each start loads the driver again; run `nvidia-smi -pm 1` as root",
        )
    if gpus:
        names = ", ".join(sorted({gpu.name for gpu in gpus}))
        yield ok(
            SUBJECT, f"{len(gpus)} x {names}, {format_bytes(gpus[0].memory_bytes)}, driver {gpus[0].driver}"
        )


def check_build_tools(gpus: int, environment: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Look for what Triton needs to launch kernels on this machine's GPUs."""
    missing = find_missing_build_tool(environment) if gpus else None
    if missing is not None:
        yield problem(SUBJECT, missing)


def check_torch_gpus(
    found: Sequence[Mapping[str, Any]], *, ranks: int, gpus: int, device: str
) -> Iterator[Finding]:
    """Compare what torch found in each rank with what the driver lists (`gpus`), and with the wanted ranks.

    found: `describe_torch` of the ranks of this node. device: the recipe's.
    """
    if not found:
        return
    torch = found[0]
    seen = len(torch["devices"])
    if device == "cpu":
        yield ok("torch", f"torch {torch['torch']} computes on CPUs, as device=cpu says")
    elif seen:
        sizes = ", ".join(sorted({f"{name} {format_bytes(size)}" for name, size in torch["devices"]}))
        yield ok(
            "torch", f"torch {torch['torch']}, CUDA {torch['cuda']}, NCCL {torch['nccl']}; {seen} x {sizes}"
        )
        if seen < ranks:
            yield problem(
                "torch",
                f"{ranks} processes need as many GPUs, and torch finds {seen}; make --cluster smaller",
            )
    elif gpus and torch["cuda"] is None:
        yield problem(
            "torch",
            f"torch {torch['torch']} is built without CUDA; install the build for the CUDA of the driver",
        )
    elif gpus:
        reason = f" ({torch['error']})" if torch["error"] else ""
        yield problem(
            "torch",
            f"the driver lists {gpus} GPUs, and torch {torch['torch']} for CUDA {torch['cuda']} can use"
            f" none{reason}; update the driver, or install a torch build for the CUDA that `nvidia-smi` shows",
        )
    elif device == "cuda":
        yield problem("torch", "device=cuda, but there is no GPU; use device=cpu")
    else:
        yield ok("torch", f"torch {torch['torch']} finds no GPU and computes on CPUs")


def _number(text: str) -> int:
    """Read a number; 0 for `[N/A]`."""
    return int(float(text)) if text.replace(".", "", 1).isdigit() else 0
