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


def divide_pool(tokens: Sequence[int], costs: Sequence[float], ranks: int, most: int) -> list[Share]:
    """Divide items among the blocks of a pool. Larger blocks come first. So before the ranks of a block work
    together, they have worked on the same number of larger blocks.

    tokens: the tokens of each item. costs: the time that it takes one rank. most: maximum number of tokens of one
    rank. A block is large enough for the tokens of its items, or has all ranks.

    An item gets a larger block if it would cost a rank more than the mean load of all ranks, or than a half, a
    quarter and so on of that. Of these limits, the highest one is chosen whose busiest rank has nearly the lowest
    load.
    """
    sizes = list_block_sizes(ranks)
    found: list[tuple[float, list[Share]]] = []
    for halvings in range(len(sizes)):
        limit = sum(costs) / ranks / 2**halvings
        found.append(_divide(tokens, costs, sizes, most, limit))
        if halvings and found[-1][1] == found[-2][1]:
            break
    lowest = min(load for load, _ in found)
    return next(shares for load, shares in found if load <= _NEARLY * lowest)


def _divide(
    tokens: Sequence[int], costs: Sequence[float], sizes: Sequence[int], most: int, limit: float
) -> tuple[float, list[Share]]:
    """Divide items, if no rank may get more than `limit` of the cost of one item. Returns the load of the busiest
    rank, too."""
    ranks = sizes[-1]
    of_sizes: dict[int, list[int]] = {size: [] for size in sizes}
    for item, (count, cost) in enumerate(zip(tokens, costs, strict=True)):
        enough = (s for s in sizes if count <= s * most and cost <= s * limit * (1 + 1e-9))
        of_sizes[next(enough, ranks)].append(item)
    loads = [0.0] * ranks
    shares = []
    for size in reversed(sizes):
        blocks: list[list[int]] = [[] for _ in range(ranks // size)]
        for item in sorted(of_sizes[size], key=lambda i: -costs[i]):
            block = min(range(len(blocks)), key=lambda b: loads[b * size])
            blocks[block].append(item)
            for rank in range(block * size, (block + 1) * size):
                loads[rank] += costs[item] / size
        shares += [
            Share(range(i * size, (i + 1) * size), sorted(block)) for i, block in enumerate(blocks) if block
        ]
    return max(loads), shares
