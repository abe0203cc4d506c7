"""Degrees of context parallelism for single items: short ones stay on one rank, and long ones are divided among as
many ranks as they need.

The ranks that may divide an item form a pool. Everything here is a pure function of token counts, so every rank of
the pool computes the same by itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass

_NEARLY = 1.02
"""A lower load of the busiest rank is worth more communication only if it is lower by more than this factor."""


@dataclass(frozen=True)
class Share:
    """Items that a block of neighbouring ranks computes together."""

    ranks: range
    """Indices of the ranks in the pool."""
    items: list[int]
    """Positions of the items, ascending."""


def list_block_sizes(ranks: int) -> list[int]:
    """List the sizes of blocks in a pool: 1, 2, 4 and so on, as far as they divide `ranks`, and all ranks.

    Each size divides the next one, so two blocks are apart, or one is a part of the other.
    """
    sizes = [1]
    while sizes[-1] * 2 < ranks and ranks % (sizes[-1] * 2) == 0:
        sizes.append(sizes[-1] * 2)
    return sizes if ranks == 1 else [*sizes, ranks]


def divide_pool(
    tokens: Sequence[int],
    costs: Sequence[float],
    ranks: int,
    most: int,
    alone: Sequence[float] | None = None,
) -> list[Share]:
    """Divide items among the blocks of a pool. Larger blocks come first. So before the ranks of a block work
    together, they have worked on the same number of larger blocks.

    tokens: the tokens of each item. costs: the time that all ranks of a block together need for it. most: maximum
    number of tokens of one rank. A block has room for the tokens of its items, or has all ranks. alone: the time
    that a single rank needs for an item, if that may be less than `costs`.

    An item gets a larger block if that saves time, and if a rank would otherwise need longer for it than the mean
    load of all ranks, or than a half, a quarter and so on of that. Of these limits, the highest one is chosen whose
    busiest rank has nearly the lowest load.
    """
    sizes, alone = list_block_sizes(ranks), costs if alone is None else alone
    least = sum(alone) / ranks
    found: list[tuple[float, list[Share]]] = []
    for halvings in range(len(sizes)):
        found.append(_divide(tokens, costs, alone, sizes, most, least / 2**halvings))
        if found[-1][0] <= _NEARLY * least:
            break
    lowest = min(load for load, _ in found)
    return next(shares for load, shares in found if load <= _NEARLY * lowest)


def _divide(
    tokens: Sequence[int],
    costs: Sequence[float],
    alone: Sequence[float],
    sizes: Sequence[int],
    most: int,
    limit: float,
) -> tuple[float, list[Share]]:
    """Divide items, if a rank should get at most `limit` of the cost of one item. Returns the load of the busiest
    rank, too."""
    ranks = sizes[-1]
    of_sizes: dict[int, list[int]] = {size: [] for size in sizes}
    for item, (count, cost, single) in enumerate(zip(tokens, costs, alone, strict=True)):
        rooms = [size for size in sizes if count <= size * most] or [ranks]
        each = {size: single if size == 1 else cost / size for size in rooms}
        enough = (size for size in rooms if each[size] <= limit * (1 + 1e-9))
        of_sizes[next(enough, min(rooms, key=lambda size: each[size]))].append(item)
    loads = [0.0] * ranks
    shares = []
    for size in reversed(sizes):
        blocks: list[list[int]] = [[] for _ in range(ranks // size)]
        parts = alone if size == 1 else [cost / size for cost in costs]
        for item in sorted(of_sizes[size], key=lambda i: -parts[i]):
            block = min(range(len(blocks)), key=lambda b: loads[b * size])
            blocks[block].append(item)
            for rank in range(block * size, (block + 1) * size):
                loads[rank] += parts[item]
        shares += [
            Share(range(i * size, (i + 1) * size), sorted(block)) for i, block in enumerate(blocks) if block
        ]
    return max(loads), shares
