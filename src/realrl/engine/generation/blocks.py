"""Block pool: which blocks of the paged KV cache are free. Pure bookkeeping on the host, equal on every rank."""

from collections.abc import Sequence

SCRATCH = 0
"""Block that belongs to no row: rows without a place write to it, and nothing of it is used."""


class BlockPool:
    """Free blocks, numbered from 1; those that were given back last are taken first."""

    def __init__(self, blocks: int) -> None:
        self._free = list(range(blocks, SCRATCH, -1))

    @property
    def free(self) -> int:
        """Number of free blocks."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Take free blocks; there must be as many."""
        assert count <= len(self._free), "the cache has no free blocks"
        return [self._free.pop() for _ in range(count)]

    def give_back(self, blocks: Sequence[int]) -> None:
        """Return blocks that were taken."""
        self._free.extend(reversed(blocks))
