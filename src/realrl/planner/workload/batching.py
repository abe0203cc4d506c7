"""Split a call's work into micro-batches, from a length distribution instead of concrete sequences."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self, TypeVar

import numpy as np

from realrl.config.errors import UserError
from realrl.plan.placement import Strategy
from realrl.planner.workload.strategies import Strategies
from realrl.planner.workload.workload import CallWork
from realrl.program.arrays import Floats, Ints

Work = TypeVar("Work")


@dataclass(frozen=True)
class PeakChunk:
    """Chunk with the peak memory of a call: it has the most tokens and the longest sequences."""

    sequences: float
    lengths: tuple[int, ...]
    """Sample of sequence lengths in a forward pass of the chunk, in tokens."""

    @property
    def tokens(self) -> float:
        """Tokens of a forward pass of the chunk."""
        return self.sequences * sum(self.lengths) / len(self.lengths)


@dataclass(frozen=True, kw_only=True)
class Chunks:
    """Micro-batches of one DP rank. Times assume chunks of equal size; peak memory is that of the largest chunk."""

    count: int
    sequences: float
    """Mean sequences of a chunk on the busiest rank."""
    tokens: float
    """Mean tokens of a chunk."""
    squares: float
    """Mean sum of squared lengths of a chunk."""
    peak: PeakChunk


@dataclass(frozen=True, kw_only=True)
class ManyChunks:
    """`Chunks` of many strategies as arrays."""

    count: Ints
    tokens: Floats
    squares: Floats
    peak_tokens: Floats
    """Tokens of a forward pass of the chunk with peak memory."""
    peak_lengths: Sequence[tuple[int, ...]]
    """Samples of sequence lengths in these chunks."""
    peak: Ints
    """Index into `peak_lengths` for each strategy."""

    @classmethod
    def of(cls, each: Sequence[Chunks]) -> Self:
        """Build from the chunks of each strategy."""
        return cls(
            count=np.array([chunks.count for chunks in each]),
            tokens=np.array([chunks.tokens for chunks in each], dtype=np.float64),
            squares=np.array([chunks.squares for chunks in each], dtype=np.float64),
            peak_tokens=np.array([chunks.peak.tokens for chunks in each], dtype=np.float64),
            peak_lengths=[chunks.peak.lengths for chunks in each],
            peak=np.arange(len(each)),
        )

    def __getitem__(self, index: Ints) -> "ManyChunks":
        return ManyChunks(
            count=self.count[index],
            tokens=self.tokens[index],
            squares=self.squares[index],
            peak_tokens=self.peak_tokens[index],
            peak_lengths=self.peak_lengths,
            peak=self.peak[index],
        )


def split_each(strategies: Strategies, split: Callable[[Strategy], Work]) -> tuple[list[Work], Ints]:
    """Call `split` once for all strategies with equal DP and PP degrees and micro-batch tokens.

    Returns the results, and for each strategy the index of its result.
    """
    known: dict[tuple[int, int, int], int] = {}
    keys = zip(
        *(a.tolist() for a in (strategies.dp, strategies.pp, strategies.micro_batch_tokens)), strict=True
    )
    where = np.array([known.setdefault(key, len(known)) for key in keys])
    return [split(Strategy(dp=dp, pp=pp, micro_batch_tokens=tokens)) for dp, pp, tokens in known], where


def split_all_work(work: CallWork, strategies: Strategies, per_stage: int) -> ManyChunks:
    """Split a mini-batch under each strategy (`split_work`)."""
    each, where = split_each(strategies, lambda strategy: split_work(work, strategy, per_stage))
    return ManyChunks.of(each)[where]


def split_work(work: CallWork, strategy: Strategy, per_stage: int) -> Chunks:
    """Split one mini-batch into micro-batches, as `engine.model.Model.split_micro_batches` does.

    A chunk has at most `micro_batch_tokens` tokens, unless one record is longer. Raises UserError if a rank would
    get no record.

    The sequences of a record stay together. The longest records are placed first, and short ones fill the gaps, so
    that all chunks except the last are nearly full. Records of equal length fill chunks evenly. In a pipeline,
    chunks are equally full, and their number is a multiple of the stages: at least `per_stage` chunks per stage, if
    there are enough records.
    """
    records = records_per_rank(work, strategy)
    costs = sorted((work.per_item * length for length in work.lengths), reverse=True)
    mean = sum(costs) / len(costs)
    longest = costs[0]
    total = mean * records
    budget = strategy.micro_batch_tokens
    alike = longest == costs[-1]
    if alike:
        count = math.ceil(records / max(1, budget // longest))
    else:
        alone = sum(cost > budget for cost in costs) / len(costs) * records
        rest = sum(cost for cost in costs if cost <= budget) / len(costs) * records
        count = max(1, min(records, round(alone) - int(-rest // budget)))
    if strategy.pp > 1:
        count = min(records, math.ceil(max(count / strategy.pp, per_stage)) * strategy.pp)
        budget = min(budget, max(longest, math.ceil(math.ceil(records / count) * mean)))
        # If there are few records, or a long one, more chunks would not be smaller.
        enough = records / max(1, budget // longest) if alike else total / budget
        count = min(count, math.ceil(enough))
    first = costs[: math.ceil(len(costs) / count)]
    if alike:
        most: float = min(records, max(1, budget // longest))
    else:
        most = max(longest, min(total, budget)) * len(first) / sum(first)
    long = tuple(cost // work.per_item for cost in first)
    sequences = records * work.per_item / count
    return Chunks(
        count=count,
        sequences=sequences,
        tokens=sequences * work.mean,
        squares=sequences * work.mean_square,
        peak=PeakChunk(most * work.per_item, long),
    )


def records_per_rank(work: CallWork, strategy: Strategy) -> int:
    """Count the records of a mini-batch on the busiest DP rank. Raises UserError if a rank would get no record."""
    whole = work.items // work.minibatches
    if whole < strategy.dp:
        raise UserError(f"a mini-batch of {whole} records cannot be split over dp={strategy.dp}")
    return -(-whole // strategy.dp)
