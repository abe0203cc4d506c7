"""Micro-batches: groups of items that pass through a model together, the ranks that compute them, and what their
rows have in common."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from realrl.data.balance import even_micro_batches, join_neighbours, micro_batches
from realrl.data.prefixes import Prefix, find_joined, find_prefixes, select_prefixes
from realrl.engine.host_items import HostItems
from realrl.layout.limits import CHUNKS_PER_STAGE
from realrl.model.packing import count_own_tokens
from realrl.plan.pool import divide_pool

_MORE = 1.1
"""Factor by which common beginnings may increase the number of micro-batches."""


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
    micro-batches are in the order in which it computes them. `attention_cost`: see
    `estimate_attention_cost`.
    """
    if not len(items):
        return []
    rows = _Rows.of(items, shares=shares, attention_cost=attention_cost)
    mean = -(-sum(rows.tokens) // ranks)
    most = max(1, min(max_tokens // ranks, mean))
    if stages > 1:
        most = min(most, -(-mean // (stages * CHUNKS_PER_STAGE)))
    if ranks > 1:
        return rows.divide(ranks, most)
    if stages == 1:
        return rows.pack(max_tokens)
    units = rows.join(most)
    loads = [rows.count(unit) for unit in units]
    groups = even_micro_batches(loads, max_tokens, stages=stages, per_stage=CHUNKS_PER_STAGE)
    return [rows.make([units[i] for i in group]) for group in groups]


@dataclass(frozen=True)
class _Rows:
    """Lengths of the rows of items, and what they have in common."""

    each: int
    """Number of rows of an item."""
    lengths: Sequence[int]
    prefixes: Sequence[Prefix]
    tokens: Sequence[int]
    """Number of tokens of each item."""
    attention_cost: float

    @classmethod
    def of(cls, items: HostItems, *, shares: bool, attention_cost: float) -> Self:
        each, lengths = items.rows_per_item, [len(row) for row in items.list_rows()]
        prefixes = find_prefixes(lengths, items.count_common()) if shares else []
        tokens = [sum(lengths[i : i + each]) for i in range(0, len(lengths), each)]
        return cls(each, lengths, prefixes, tokens, attention_cost)

    def join(self, most: int) -> list[range]:
        """Join items with a common beginning to units of at most `most` tokens."""
        joined = find_joined(self.prefixes, len(self.tokens), lambda row: row // self.each)
        return join_neighbours(self.tokens, joined, most)

    def count(self, unit: range) -> int:
        """Count all tokens of a unit."""
        return sum(self.tokens[item] for item in unit)

    def make(self, units: Sequence[range], ranks: range = range(1)) -> MicroBatch:
        """Make a micro-batch of units."""
        items = sorted(item for unit in units for item in unit)
        rows = [item * self.each + i for item in items for i in range(self.each)]
        common = select_prefixes(self.prefixes, rows) if len(ranks) == 1 else []
        spared = sum(prefix.saved for prefix in common)
        squares = sum(self.lengths[row] ** 2 for row in rows) - sum(of.saved * of.tokens for of in common)
        tokens = sum(self.tokens[item] for item in items)
        return MicroBatch(items, ranks, tokens - spared, spared, squares, common)

    def pack(self, most: int) -> list[MicroBatch]:
        """Make micro-batches of at most `most` tokens for one rank.

        Whole units leave room in micro-batches. So they may be halved and quartered, if whole ones need more
        micro-batches than single items do. Of the rest, the units with the fewest tokens to compute are chosen.
        """
        fewest = len(micro_batches(self.tokens, most))
        found = []
        for parts in (1, 2, 4):
            units = self.join(-(-most // parts))
            groups = micro_batches([self.count(unit) for unit in units], most)
            if len(groups) <= _MORE * fewest:
                found.append([self.make([units[i] for i in group]) for group in groups])
            if not self.prefixes or (found and len(groups) == fewest):
                break
        if not found:
            return [
                self.make([range(item, item + 1) for item in group])
                for group in micro_batches(self.tokens, most)
            ]
        return min(found, key=lambda of: sum(micro_batch.tokens for micro_batch in of))

    def divide(self, ranks: int, most: int) -> list[MicroBatch]:
        """Make micro-batches for the ranks of a pool, each with at most `most` tokens per rank."""
        units = self.join(most)
        alone = [self.make([unit]) for unit in units]
        tokens = [self.count(unit) for unit in units]
        shares = divide_pool(
            tokens,
            [
                self._estimate_cost(of.tokens + of.spared, self._count_squares(unit))
                for of, unit in zip(alone, units, strict=True)
            ],
            ranks,
            most,
            [self._estimate_cost(of.tokens, of.squares) for of in alone],
        )
        found = []
        for share in shares:
            of_share = [units[i] for i in share.items]
            for group in micro_batches([self.count(unit) for unit in of_share], most * len(share.ranks)):
                found.append(self.make([of_share[i] for i in group], share.ranks))
        return found

    def _count_squares(self, unit: range) -> int:
        return sum(n * n for n in self.lengths[unit.start * self.each : unit.stop * self.each])

    def _estimate_cost(self, tokens: int, squares: int) -> float:
        """Estimate the time for these tokens, in the time of one token without attention."""
        return tokens + self.attention_cost * squares
