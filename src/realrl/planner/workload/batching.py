"""Split a call's work into micro-batches, from a length distribution instead of concrete sequences."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import lru_cache
from typing import Any, TypeVar, cast

import numpy as np

from realrl.config.errors import UserError
from realrl.layout.limits import CHUNKS_PER_STAGE, LEAST_SHARED
from realrl.plan.placement import Strategy
from realrl.plan.pool import divide_pool, list_block_sizes
from realrl.planner.workload.strategies import Strategies
from realrl.planner.workload.workload import CallWork
from realrl.program.arrays import Ints

Work = TypeVar("Work")
_SAMPLE = 128
"""Items that represent a mini-batch when CP ranks divide it."""


@dataclass(frozen=True)
class PeakChunk:
    """Chunk (micro-batch) with the peak memory of a call. It has the most tokens and the longest sequences."""

    sequences: Any
    lengths: Any
    """Sample of sequence lengths in a forward pass of the chunk, in tokens: a tuple, or an array of tuples."""

    @property
    def tokens(self) -> Any:
        if isinstance(self.lengths, tuple):
            return self.sequences * sum(self.lengths) / len(self.lengths)
        return self.sequences * np.array([*map(sum, self.lengths)]) / np.array([*map(len, self.lengths)])


@dataclass(frozen=True, kw_only=True)
class Chunks:
    """Micro-batches (chunks) of one DP rank. Fields are numbers for one strategy, or arrays for many
    (`split_all_work`).

    Times assume chunks of equal size. Peak memory is that of the largest chunk.
    """

    count: Any
    sequences: Any
    """Mean number of sequences of a chunk on the busiest rank."""
    tokens: Any
    """Mean number of tokens of a chunk."""
    squares: Any
    """Mean over chunks of the sum of squared sequence lengths."""
    divided: Any = 0.0
    """Share of the tokens whose chunks several CP ranks divide."""
    exchanged: Any = 0.0
    """Keys and values that CP ranks gather, relative to the case in which all of them divide all tokens."""
    peak: PeakChunk


def split_each(strategies: Strategies, split: Callable[[Strategy], Work]) -> Work:
    """Call `split` once for each group of strategies with equal DP, CP and PP degrees and micro-batch tokens.

    `split` returns a dataclass of numbers. The results of all strategies are returned as one dataclass of arrays,
    [strategies].
    """
    known: dict[tuple[int, int, int, int], int] = {}
    columns = strategies.dp, strategies.cp, strategies.pp, strategies.micro_batch_tokens
    keys = zip(*(column.tolist() for column in columns), strict=True)
    where = np.array([known.setdefault(key, len(known)) for key in keys])
    each = [split(Strategy(dp=dp, cp=cp, pp=pp, micro_batch_tokens=tokens)) for dp, cp, pp, tokens in known]
    return cast(Work, _gather(each, where))


def _gather(values: Sequence[Any], where: Ints) -> Any:
    """Gather values at indices into an array. Dataclasses are gathered into a dataclass of arrays."""
    first = values[0]
    if is_dataclass(first) and not isinstance(first, type):
        columns = {f.name: [getattr(value, f.name) for value in values] for f in fields(first)}
        return type(first)(**{name: _gather(column, where) for name, column in columns.items()})
    if isinstance(first, tuple):
        return np.fromiter(values, dtype=object, count=len(values))[where]
    return np.array(values)[where]


def split_all_work(work: CallWork, strategies: Strategies) -> Chunks:
    """Split a mini-batch under each strategy (`split_work`)."""
    return split_each(strategies, lambda strategy: split_work(work, strategy))


def split_work(work: CallWork, strategy: Strategy) -> Chunks:
    """Split one mini-batch into micro-batches, as `engine.micro_batches.split_items` does.

    A chunk has at most `micro_batch_tokens` tokens, unless one record is longer. Raises UserError if a rank would
    get no record.

    The sequences of a record stay together. The longest records are placed first, and short ones fill the gaps, so
    that all chunks except the last are nearly full. Records of equal length fill chunks evenly. In a pipeline,
    chunks are equally full, and their number is a multiple of the number of stages. There are at least
    `CHUNKS_PER_STAGE` chunks per stage if there are enough records.
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
        count = min(records, math.ceil(max(count / strategy.pp, CHUNKS_PER_STAGE)) * strategy.pp)
        budget = min(budget, max(longest, math.ceil(math.ceil(records / count) * mean)))
        # If there are few records, or one long record, more chunks would not be smaller.
        enough = records / max(1, budget // longest) if alike else total / budget
        count = min(count, math.ceil(enough))
    first = costs[: math.ceil(len(costs) / count)]
    if alike:
        most: float = min(records, max(1, budget // longest))
    else:
        most = max(longest, min(total, budget)) * len(first) / sum(first)
    long = tuple(cost // work.per_item for cost in first)
    load = find_load(work, strategy)
    return Chunks(
        count=count,
        sequences=load.sequences / count,
        tokens=load.tokens / count,
        squares=load.squares / count,
        divided=load.divided,
        exchanged=load.exchanged,
        peak=PeakChunk(most * work.per_item, long),
    )


@dataclass(frozen=True)
class Load:
    """Work of the busiest DP rank in a mini-batch. A prompt counts once for samples that are computed together."""

    sequences: float
    tokens: float
    squares: float
    """Sum of squared sequence lengths."""
    divided: float = 0.0
    """See `Chunks`."""
    exchanged: float = 0.0
    """See `Chunks`."""


def find_load(work: CallWork, strategy: Strategy) -> Load:
    """Find the load of the busiest DP rank, with all its CP peers, as `data.balance.partition_shared` and
    `engine.micro_batches` divide items of mean length. Raises UserError if a rank would get no record."""
    records, shared, cp = records_per_rank(work, strategy), work.shared, strategy.cp
    divided, exchanged = _find_division(work, strategy, records)
    if shared is None:
        sequences = records * work.per_item
        return Load(sequences, sequences * work.mean, sequences * work.mean_square, divided, exchanged)
    whole = work.items // work.minibatches
    most = strategy.micro_batch_tokens / cp
    if strategy.pp > 1:
        most = min(most, records * work.per_item * work.mean / (cp * strategy.pp * CHUNKS_PER_STAGE))
    # Samples of a prompt stay together in runs. A micro-batch may have room for a part of a run.
    run = work.samples
    loads = []
    while True:
        runs = math.ceil(math.ceil(whole / run) / (strategy.dp * cp))
        sequences = cp * min(whole, runs * run) * work.per_item
        together = min(run, max(1, int(most / (work.per_item * work.mean)))) * work.per_item
        spared = sequences * (1 - 1 / together)
        if spared * shared.tokens < LEAST_SHARED * sequences * work.mean:
            spared = 0.0
        spared *= 1 - divided
        loads.append(
            Load(
                sequences,
                sequences * work.mean - spared * shared.tokens,
                sequences * work.mean_square - spared * shared.squares,
                divided,
                exchanged,
            )
        )
        if run == 1:
            return min(loads, key=lambda load: load.tokens)
        run = -(-run // 2)


def _find_division(work: CallWork, strategy: Strategy, records: int) -> tuple[float, float]:
    """Find how much CP ranks divide sequences (`Chunks.divided`, `Chunks.exchanged`)."""
    cp = strategy.cp
    if cp == 1:
        return 0.0, 0.0
    costs = [work.per_item * length for length in work.lengths]
    mean = records * sum(costs) / len(costs) / cp
    most = min(strategy.micro_batch_tokens / cp, mean)
    if strategy.pp > 1:
        most = min(most, mean / (strategy.pp * CHUNKS_PER_STAGE))
    return _divide_items(tuple(costs), min(records, _SAMPLE), mean, cp, max(1, math.ceil(most)))


@lru_cache(maxsize=4096)
def _divide_items(
    costs: tuple[int, ...], records: int, mean: float, cp: int, most: int
) -> tuple[float, float]:
    """Divide `records` items among `cp` ranks by `divide_pool`, as the engine does. But here, time is proportional
    to tokens.

    `mean` is the load of a rank. If it is higher than these items cause, they stand for more items. Many items are
    easily balanced, so then an item is only divided if it does not fit into one rank.
    """
    items = [costs[(2 * i + 1) * len(costs) // (2 * records)] for i in range(records)]
    if mean * cp > 1.5 * sum(items):
        sizes = list_block_sizes(cp)
        shares = [(next((size for size in sizes if cost <= size * most), cp), cost) for cost in items]
    else:
        shares = [
            (len(share.ranks), items[i]) for share in divide_pool(items, items, cp, most) for i in share.items
        ]
    divided = sum(cost for size, cost in shares if size > 1)
    exchanged = sum(cost * (size - 1) / (cp - 1) for size, cost in shares)
    return divided / sum(items), exchanged / sum(items)


def records_per_rank(work: CallWork, strategy: Strategy) -> int:
    """Count the records of a mini-batch on the busiest DP rank. Raises UserError if a rank would get no record."""
    whole = work.items // work.minibatches
    if whole < strategy.dp:
        raise UserError(f"a mini-batch of {whole} records cannot be split over dp={strategy.dp}")
    return -(-whole // strategy.dp)
