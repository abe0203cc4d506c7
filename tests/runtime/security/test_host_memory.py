"""Memory that a step frees serves the next one."""

import mmap
import os
import subprocess
import sys

import pytest

from realrl.runtime.processes.host_memory import read_memory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator, /proc")

FAULTS = """
import resource
from realrl.runtime.processes.host_memory import steady_memory
steady_memory()
block = bytearray(16 << 20)
del block
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    block = bytearray(16 << 20)
    del block
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def count_page_faults(**variables: str) -> int:
    """Page faults of 20 blocks of 4096 pages, one after the other."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    command = [sys.executable, "-c", FAULTS]
    done = subprocess.run(
        command, env={**environment, **variables}, capture_output=True, text=True, check=True
    )
    return int(done.stdout)


def test_large_blocks_are_reused_without_page_faults() -> None:
    assert count_page_faults() < 4096


def test_the_allocators_settings_of_the_environment_stay() -> None:
    assert count_page_faults(MALLOC_MMAP_THRESHOLD_="1000000", MALLOC_TRIM_THRESHOLD_="0") > 20 * 4000


def test_resident_memory_counts_what_is_touched() -> None:
    before = read_memory()
    # Of the system itself: the allocator would take a block that is resident already.
    with mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as block:
        block.write(b"x" * (64 << 20))
        during = read_memory()
    after = read_memory()
    # The system counts some pages late.
    assert during.resident - before.resident > 60 << 20
    assert after.resident < during.resident - (60 << 20) and after.peak > during.resident - (4 << 20)
