"""Host memory of this process: how much of it is resident, and what its allocator keeps. No torch."""

import ctypes
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Numbers of options in glibc's malloc.h."""
LARGEST_HEAP_BLOCK = 32 << 20
"""Bytes from which glibc maps a block by itself, and unmaps it when it is freed; the largest it accepts."""


@dataclass(frozen=True)
class HostMemory:
    """Resident memory of a process, in bytes: now, and at most so far."""

    resident: int
    peak: int


def read_memory() -> HostMemory | None:
    """Read the resident memory of this process, shared libraries included; None where the system does not tell."""
    with suppress(OSError, ValueError, KeyError):
        lines = Path("/proc/self/status").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines if line.startswith(("VmRSS", "VmHWM")))
        sizes = {name: int(text.split()[0]) * 1024 for name, text in fields.items()}
        return HostMemory(resident=sizes["VmRSS"], peak=sizes["VmHWM"])
    return None


def keep_freed_memory() -> None:
    """Have malloc keep freed blocks for the next allocation instead of giving each back to the system at once.

    By default glibc unmaps large blocks when they are freed, and a training step asks for them all again,
    thousands of page faults each time. Does nothing where the C library is another one.
    """
    libc = _glibc()
    if libc is not None:
        libc.mallopt(_MMAP_THRESHOLD, LARGEST_HEAP_BLOCK)
        libc.mallopt(_TRIM_THRESHOLD, 2**31 - 1)


def release_freed_memory() -> None:
    """Give memory that is free back to the system, also between blocks that are in use."""
    libc = _glibc()
    if libc is not None:
        libc.malloc_trim(0)


@cache
def _glibc() -> ctypes.CDLL | None:
    """The C library, if it is glibc; macOS and musl have neither of the two functions."""
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim") else None
