"""Resident host memory of this process, and limits on the freed memory that glibc and oneDNN keep. Does not import torch."""

import ctypes
import os
import resource
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENAS = -1, -3, -8
"""Numbers of options in glibc's malloc.h."""
_LARGEST_HEAP_BLOCK = 32 << 20
"""glibc maps blocks of at least this many bytes separately, and unmaps them when they are freed: its maximum."""
_KEPT_BYTES = 2**31 - 1
"""Bytes at the end of the heap that glibc keeps, at most: its maximum."""
_PRIMITIVES = "24"
"""Compiled products in each cache of oneDNN: enough for a micro-batch, since every layer repeats them."""
_PRIMITIVE_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
"""Environment variables for the sizes of oneDNN's own cache and of the one in torch, 1024 entries by default."""


@dataclass(frozen=True)
class HostMemory:
    """Resident memory of a process, in bytes: now, and at most so far. Shared libraries are in it."""

    resident: int
    peak: int


def read_memory() -> HostMemory:
    """Read the resident memory of this process; the peak for both if the system does not tell more."""
    with suppress(OSError, ValueError, KeyError):
        lines = Path("/proc/self/status").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines if line.startswith(("VmRSS", "VmHWM")))
        sizes = {name: int(text.split()[0]) * 1024 for name, text in fields.items()}
        return HostMemory(resident=sizes["VmRSS"], peak=sizes["VmHWM"])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return HostMemory(resident=peak, peak=peak)


def steady_memory() -> None:
    """Have libraries reuse the memory of a step in the next one. Call before the first product is computed.

    By default glibc maps and unmaps large blocks, and the next training step asks for them again, with thousands of
    page faults. Also, oneDNN keeps compiled code for a thousand shapes of each product, over a megabyte for each.
    But packed micro-batches hardly ever have a shape twice. Environment variables of the user stay.
    """
    for name in _PRIMITIVE_CACHES:
        os.environ.setdefault(name, _PRIMITIVES)
    # Neither macOS nor musl has this function.
    libc = ctypes.CDLL(None) if sys.platform.startswith("linux") else None
    if libc is None or not hasattr(libc, "mallopt"):
        return
    if "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        libc.mallopt(_MMAP_THRESHOLD, _LARGEST_HEAP_BLOCK)
    if "MALLOC_TRIM_THRESHOLD_" not in os.environ:
        libc.mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)
    if "MALLOC_ARENA_MAX" not in os.environ:
        # One heap for all threads, so that they use each other's freed memory.
        libc.mallopt(_ARENAS, 1)
