"""Directory of a run: write access, room, speed, and its clock. No torch."""

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from realrl.config.files import reason_of
from realrl.config.values import format_bytes
from realrl.runtime.doctor.finding import Finding, ok, problem, warning

SUBJECT = "run directory"
_PART = 4 << 20
_MOST, _SECONDS = 64 << 20, 2.0
"""Bytes that are written to measure the speed, and seconds after which that ends."""
_SLOW = 300.0
"""Seconds for a checkpoint that are worth a warning."""
_SKEW = 2.0
"""Seconds that the clocks of a file system and this machine may differ: files of ranks are read by their age."""
_VOLATILE = ("tmpfs", "ramfs")


def check_storage(
    run_dir: Path,
    need: int | None,
    *,
    mounts: Path = Path("/proc/self/mounts"),
    now: Callable[[], float] = time.time,
) -> Iterator[Finding]:
    """Try to write where the run will, and measure room, speed and clock there.

    `need`: bytes of a checkpoint with all that a resumed run needs, if that is known. Leaves nothing behind.
    """
    nearest = next(folder for folder in (run_dir, *run_dir.absolute().parents) if folder.exists())
    if not nearest.is_dir():
        yield problem(SUBJECT, f"{nearest} is a file; choose another run_dir")
        return
    try:
        written, seconds, skew = _write(nearest, now)
    except OSError as error:
        yield problem(SUBJECT, f"{run_dir} cannot be written: {reason_of(error)}; choose another run_dir")
        return
    room = os.statvfs(nearest)
    free = room.f_bavail * room.f_frsize
    speed = written / max(seconds, 1e-6)
    yield from _judge_room(run_dir, free, need)
    if need is not None and need / speed > _SLOW:
        yield warning(
            SUBJECT,
            f"a checkpoint of {format_bytes(need)} takes {need / speed / 60:.0f} minutes at {format_bytes(speed)}/s"
            "; choose a faster file system, or save less often",
        )
    if room.f_files and room.f_favail < 1000:
        yield problem(SUBJECT, f"{nearest} has room for {room.f_favail} more files; remove some")
    kind = _find_kind(nearest, mounts)
    if kind in _VOLATILE:
        yield warning(
            SUBJECT, f"{nearest} is in memory ({kind}): a restart of the machine loses it; choose a disk"
        )
    if abs(skew) > _SKEW:
        yield warning(
            SUBJECT,
            f"the clock of the file system is {abs(skew):.1f} s {'ahead' if skew > 0 else 'behind'}: files of ranks"
            " seem older or newer than they are; synchronise the clocks (NTP) of this machine and the file server",
        )
    about = "" if need is None else f"; a checkpoint needs {format_bytes(need)}"
    container = ": gone with its container" if kind == "overlay" else ""
    kind = f", {kind}{container}" if kind else ""
    yield ok(SUBJECT, f"{format_bytes(free)} free at {format_bytes(speed)}/s (synchronised{kind}){about}")


def _judge_room(run_dir: Path, free: int, need: int | None) -> Iterator[Finding]:
    if need is None:
        if free < 1 << 30:
            yield warning(
                SUBJECT,
                f"{format_bytes(free)} are free at {run_dir}; name a recipe to compare with its needs",
            )
    elif free < 2 * need:
        yield problem(
            SUBJECT,
            f"{format_bytes(free)} are free, and two checkpoints of {format_bytes(need)} must fit: one is kept"
            " until the next is whole; make room, or choose another run_dir",
        )
    elif free < 4 * need:
        yield warning(
            SUBJECT,
            f"{format_bytes(free)} are free, room for {free // need} checkpoints of {format_bytes(need)}",
        )


def _write(folder: Path, now: Callable[[], float]) -> tuple[int, float, float]:
    """Write a file that nobody sees: its bytes, the seconds until they are on disk, and its age from the future."""
    part = os.urandom(_PART)
    with tempfile.NamedTemporaryFile(dir=folder, buffering=0) as file:
        start = time.monotonic()
        written = 0
        while written < _MOST and time.monotonic() < start + _SECONDS:
            written += file.write(part)
        os.fsync(file.fileno())
        seconds = time.monotonic() - start
        before = now()
        os.utime(file.fileno())
        stamp, after = os.stat(file.fileno()).st_mtime, now()
    skew = min(0.0, stamp - before) if stamp < before else max(0.0, stamp - after)
    return written, seconds, skew


def _find_kind(folder: Path, mounts: Path) -> str:
    """Find the type of the file system of a folder; empty where it cannot be told."""
    try:
        lines = mounts.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    found = [line.split()[1:3] for line in lines if len(line.split()) > 2]
    inside = folder.resolve()
    holding = [(place, kind) for place, kind in found if inside.is_relative_to(place.replace("\\040", " "))]
    # Of two mounts in one place, the later one is seen.
    return max(enumerate(holding), key=lambda one: (len(one[1][0]), one[0]))[1][1] if holding else ""
