"""Micro-batches: groups of items that pass through a model together, the ranks that compute them, and what their
rows have in common."""

from collections.abc import Sequence
from dataclasses import dataclass

from realrl.data.balance import even_micro_batches, join_neighbours, micro_batches
from realrl.data.prefixes import Prefix, find_joined, find_prefixes, select_prefixes
from realrl.engine.host_items import HostItems
from realrl.layout.limits import CHUNKS_PER_STAGE
from realrl.model.packing import count_own_tokens
from realrl.plan.pool import divide_pool


@dataclass(frozen=True)
class MicroBatch:
    """Some items of a batch."""

    items: list[int]
    """Positions of the items in the batch, ascending."""
    ranks: range
    """Indices of the context-parallel ranks that divide their tokens."""
    tokens: int
    """Number of tokens that the passes of all these ranks compute."""
    spared: int
    """Number of tokens that the rows have in addition, because they share common beginnings."""
    squares: int
    """Sum of the squared lengths of rows. The square of a common beginning counts once."""
    prefixes: Sequence[Prefix]
    """Common beginnings of the rows of these items, which are computed only once."""

    @property
    def own_tokens(self) -> int:
        """Number of tokens that each rank computes."""
        return count_own_tokens(self.tokens, len(self.ranks))


def split_items(
    items: HostItems,
    *,
    max_tokens: int,
    stages: int,
    shares: bool,
    ranks: int = 1,
    attention_cost: float = 0.0,
) -> list[MicroBatch]:
    """Split items into micro-batches of at most `max_tokens` tokens. A pipeline gets about two micro-batches per
    stage, or more.

    `shares`: whether the common beginnings of neighbouring rows are computed only once. They count as often as they
    occur towards `max_tokens`, so memory does not depend on what rows have in common.

    `ranks`: number of context-parallel ranks. Each micro-batch is computed by as many of them as it needs, so that
    none has more than its part of `max_tokens`, and all have about the same work (see `divide_pool`). A rank's
    micro-batches are in the order in which it computes them. `attention_cost`: time to attend to one token,
    relative to all other work on a token.
    """
    if not len(items):
        return []
    each = items.rows_per_item
    lengths = [len(row) for row in items.list_rows()]
    tokens = [sum(lengths[i : i + each]) for i in range(0, len(lengths), each)]
    prefixes = find_prefixes(lengths, items.count_common()) if shares else []
    most = max(1, max_tokens // ranks)
    if stages > 1:
        most = min(most, -(-sum(tokens) // (ranks * stages * CHUNKS_PER_STAGE)))
    # Items with a common beginning are split only if they have too many tokens for one rank.
    mean = -(-sum(tokens) // ranks)
    units = join_neighbours(
        tokens, find_joined(prefixes, len(items), lambda row: row // each), min(most, mean)
    )
    unit_tokens = [sum(tokens[item] for item in unit) for unit in units]
    if ranks == 1:
        everyone = range(1)
        if stages == 1:
            groups = micro_batches(unit_tokens, max_tokens)
        else:
            groups = even_micro_batches(unit_tokens, max_tokens, stages=stages, per_stage=CHUNKS_PER_STAGE)
        divided = [(everyone, group) for group in groups]
    else:
        costs = [
            sum(n + attention_cost * n**2 for n in lengths[unit.start * each : unit.stop * each])
            for unit in units
        ]
        divided = []
        for share in divide_pool(unit_tokens, costs, ranks, most):
            of_share = [unit_tokens[unit] for unit in share.items]
            for group in micro_batches(of_share, most * len(share.ranks)):
                divided.append((share.ranks, [share.items[i] for i in group]))
    found = []
    for of_group, group in divided:
        members = [item for unit in group for item in units[unit]]
        rows = [item * each + i for item in members for i in range(each)]
        common = select_prefixes(prefixes, rows) if len(of_group) == 1 else []
        spared = sum(prefix.saved for prefix in common)
        squares = sum(lengths[row] ** 2 for row in rows) - sum(of.saved * of.tokens for of in common)
        count = sum(tokens[item] for item in members) - spared
        found.append(MicroBatch(members, of_group, count, spared, squares, common))
    return found
