"""Micro-batches: groups of items that pass through a model together, and what their rows have in common."""

from collections.abc import Sequence
from dataclasses import dataclass

from realrl.data.balance import even_micro_batches, join_neighbours, micro_batches
from realrl.data.prefixes import Prefix, find_joined, find_prefixes, select_prefixes
from realrl.engine.host_items import HostItems
from realrl.layout.limits import CHUNKS_PER_STAGE


@dataclass(frozen=True)
class MicroBatch:
    """Some items of a batch."""

    items: Sequence[int]
    """Positions of the items in the batch, ascending."""
    tokens: int
    """Number of tokens that the passes compute."""
    prefixes: Sequence[Prefix]
    """Common beginnings of the rows of these items, which are computed only once."""


def split_items(items: HostItems, *, max_tokens: int, stages: int, shares: bool) -> list[MicroBatch]:
    """Split items into micro-batches of at most `max_tokens` tokens. A pipeline gets about two micro-batches per
    stage, or more.

    `shares`: whether the common beginnings of neighbouring rows are computed only once. They count as often as they
    occur towards `max_tokens`, so memory does not depend on what rows have in common.
    """
    if not len(items):
        return []
    each = items.rows_per_item
    lengths = [len(row) for row in items.list_rows()]
    costs = [sum(lengths[i : i + each]) for i in range(0, len(lengths), each)]
    prefixes = find_prefixes(lengths, items.count_common()) if shares else []
    most = max_tokens if stages == 1 else min(max_tokens, -(-sum(costs) // (stages * CHUNKS_PER_STAGE)))
    # Items with a common beginning are split only if they have too many tokens.
    units = join_neighbours(costs, find_joined(prefixes, len(items), lambda row: row // each), most)
    loads = [sum(costs[item] for item in unit) for unit in units]
    if stages == 1:
        groups = micro_batches(loads, max_tokens)
    else:
        groups = even_micro_batches(loads, max_tokens, stages=stages, per_stage=CHUNKS_PER_STAGE)
    found = []
    for group in groups:
        members = [item for unit in group for item in units[unit]]
        common = select_prefixes(prefixes, [item * each + i for item in members for i in range(each)])
        tokens = sum(costs[item] for item in members) - sum(prefix.saved for prefix in common)
        found.append(MicroBatch(members, tokens, common))
    return found
