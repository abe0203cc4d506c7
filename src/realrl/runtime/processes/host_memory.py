"""Read the resident memory of this process, and limit the freed memory that glibc and oneDNN keep.

Does not import torch.
"""

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
"""glibc maps blocks of at least this many bytes separately, and unmaps them when they are freed. It accepts no
higher threshold."""
_KEPT_BYTES = 2**31 - 1
"""Maximum bytes that glibc keeps at the end of the heap, here the highest possible value."""
_PRIMITIVES = "24"
"""Number of compiled products in each cache of oneDNN. It is enough for a micro-batch, because all layers compute
the same products."""
_PRIMITIVE_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
"""Environment variables for the size of oneDNN's own cache and of torch's cache, which have 1024 entries by
default."""


@dataclass(frozen=True)
class HostMemory:
    """Resident memory of a process in bytes, including shared libraries: the current value, and the peak so far."""

    resident: int
    peak: int


def read_memory() -> HostMemory:
    """Read the resident memory of this process. Both values are the peak if the system reports only the peak."""
    with suppress(OSError, ValueError, KeyError):
        lines = Path("/proc/self/status").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines if line.startswith(("VmRSS", "VmHWM")))
        sizes = {name: int(text.split()[0]) * 1024 for name, text in fields.items()}
        return HostMemory(resident=sizes["VmRSS"], peak=sizes["VmHWM"])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return HostMemory(resident=peak, peak=peak)


def steady_memory() -> None:
    """Make libraries reuse the memory of a step in the next step. Call this before the first product is computed.

    By default, glibc unmaps large blocks when they are freed. The next training step maps them again, with
    thousands of page faults. Also, oneDNN keeps compiled code for a thousand shapes of each product, with over a
    megabyte for each shape. Packed micro-batches hardly ever have the same shape twice, so this memory is wasted.
    Environment variables that the user has set are not changed.
    """
    for name in _PRIMITIVE_CACHES:
        os.environ.setdefault(name, _PRIMITIVES)
    # macOS and musl do not have this function.
    libc = ctypes.CDLL(None) if sys.platform.startswith("linux") else None
    if libc is None or not hasattr(libc, "mallopt"):
        return
    if "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        libc.mallopt(_MMAP_THRESHOLD, _LARGEST_HEAP_BLOCK)
    if "MALLOC_TRIM_THRESHOLD_" not in os.environ:
        libc.mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)
    if "MALLOC_ARENA_MAX" not in os.environ:
        # Use one heap for all threads, so that they reuse each other's freed memory.
        libc.mallopt(_ARENAS, 1)
