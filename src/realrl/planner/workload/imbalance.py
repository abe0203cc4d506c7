"""Imbalance of data-parallel ranks: how much more the busiest rank computes than the others in the mean."""

import heapq
from dataclasses import dataclass
from functools import lru_cache
from math import ceil

import numpy as np

from realrl.planner.workload.workload import GOLDEN
from realrl.program.arrays import Floats

_FEW = 16
"""Number of units per rank up to which each of them is assigned to a rank. Of more units, only the `_LONGEST` per
rank are assigned. The others fill all gaps."""
_LONGEST = 4


@dataclass(frozen=True)
class Imbalance:
    """Load of the busiest rank, relative to the mean of all ranks."""

    tokens: float
    squares: float
    """The same for sums of squared sequence lengths."""


EVEN = Imbalance(1.0, 1.0)


@lru_cache(maxsize=4096)
def find_imbalance(
    lengths: tuple[int, ...],
    records: int,
    ranks: int,
    *,
    attention_cost: float,
    per_record: int = 1,
    run: int = 1,
    longest: int = 0,
) -> Imbalance:
    """Divide a typical mini-batch of `records` records among ranks, as `data.balance.partition_shared` does.

    lengths: sorted sample of sequence lengths, in tokens. attention_cost: see
    `families.sizes.estimate_attention_cost`. per_record: sequences of a record. run: records that stay together.
    longest: expected length of the longest sequence of the mini-batch, if `lengths` lack it.

    The mini-batch has the lengths of the sample in proportion. So it lacks the chance by which real mini-batches
    have more or fewer long sequences.
    """
    typical = np.asarray(lengths, dtype=float)[(2 * np.arange(records) + 1) * len(lengths) // (2 * records)]
    typical[-1] = max(typical[-1], longest)
    if typical[0] == typical[-1]:
        most = min(records, run * ceil(ceil(records / run) / ranks)) * ranks / records
        return Imbalance(most, most)
    if run > 1:
        typical = typical[np.argsort(np.arange(records) * GOLDEN % 1)]
    starts = np.arange(0, records, run)
    tokens = per_record * np.add.reduceat(typical, starts)
    squares = per_record * np.add.reduceat(typical**2, starts)
    busiest = _find_busiest(tokens, squares, ranks, attention_cost)
    return Imbalance(
        float(busiest.tokens * ranks / tokens.sum()), float(busiest.squares * ranks / squares.sum())
    )


def _find_busiest(tokens: Floats, squares: Floats, ranks: int, attention_cost: float) -> Imbalance:
    """Find the load of the busiest rank. Units are taken longest first, and each goes to the idlest rank so far."""
    costs = tokens + attention_cost * squares
    order = np.argsort(-costs, kind="stable")
    assigned = order if len(order) <= _FEW * ranks else order[: _LONGEST * ranks]
    loads = [(0.0, rank) for rank in range(ranks)]
    of_ranks = np.zeros((ranks, 2))
    for unit in assigned.tolist():
        load, rank = loads[0]
        of_ranks[rank] += tokens[unit], squares[unit]
        heapq.heapreplace(loads, (load + costs[unit], rank))
    load, rank = max(loads)
    if load * ranks < costs.sum() and len(assigned) < len(order):
        return Imbalance(tokens.sum() / ranks, squares.sum() / ranks)
    return Imbalance(*of_ranks[rank])
