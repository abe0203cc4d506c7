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
from realrl.planner.workload.imbalance import Imbalance, find_imbalance
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
    tokens: Any
    """Mean number of tokens of a chunk on the busiest rank."""
    squares: Any
    """Mean over its chunks of the sum of squared sequence lengths."""
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
    tp, ep = strategies.tp, strategies.ep
    each = [
        split(Strategy(dp=dp, cp=cp, tp=tp, pp=pp, ep=ep, micro_batch_tokens=tokens))
        for dp, cp, pp, tokens in known
    ]
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


def split_all_work(work: CallWork, strategies: Strategies, attention_cost: float) -> Chunks:
    """Split a mini-batch under each strategy (`split_work`)."""
    return split_each(strategies, lambda strategy: split_work(work, strategy, attention_cost))


def split_work(work: CallWork, strategy: Strategy, attention_cost: float = 0.0) -> Chunks:
    """Split one mini-batch into micro-batches, as `engine.micro_batches.split_items` does. `attention_cost`: see
    `families.sizes.estimate_attention_cost`.

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
    load = find_load(work, strategy, attention_cost)
    return Chunks(
        count=count,
        tokens=load.tokens * load.busiest.tokens / count,
        squares=load.squares * load.busiest.squares / count,
        divided=load.division.divided,
        exchanged=load.division.exchanged,
        peak=PeakChunk(most * work.per_item, long),
    )


@dataclass(frozen=True)
class Division:
    """How CP ranks divide the sequences of a mini-batch."""

    divided: float = 0.0
    """See `Chunks`."""
    exchanged: float = 0.0
    """See `Chunks`."""
    busiest: float = 1.0
    """Work of the busiest CP rank, relative to the mean."""


@dataclass(frozen=True)
class Load:
    """Work of a DP rank in a mini-batch, with all its CP peers. A prompt counts once for samples that are computed
    together."""

    sequences: float
    tokens: float
    squares: float
    """Sum of squared sequence lengths."""
    busiest: Imbalance
    """Work of the busiest DP rank, relative to this mean."""
    division: Division


def find_load(work: CallWork, strategy: Strategy, attention_cost: float = 0.0) -> Load:
    """Find the load of DP ranks, as `data.balance.partition_shared` and `engine.micro_batches` divide items.

    `attention_cost`: see `families.sizes.estimate_attention_cost`. Raises UserError if a rank would get no record.
    """
    records_per_rank(work, strategy)
    whole, shared = work.items // work.minibatches, work.shared
    sequences = work.items / work.minibatches / strategy.dp * work.per_item
    division = _find_division(work, strategy, attention_cost)

    def find_busiest(run: int) -> Imbalance:
        # CP ranks divide long sequences, but not runs.
        alike = work.lengths[0] == work.lengths[-1]
        ranks = strategy.dp * (strategy.cp if alike and shared is not None else 1)
        found = find_imbalance(
            work.lengths,
            whole,
            ranks,
            attention_cost=attention_cost,
            per_record=work.per_item,
            run=run,
            longest=work.longest_of_minibatch,
        )
        return Imbalance(max(found.tokens, division.busiest), max(found.squares, division.busiest))

    if shared is None:
        return Load(sequences, sequences * work.mean, sequences * work.mean_square, find_busiest(1), division)
    most, mean = strategy.micro_batch_tokens / strategy.cp, sequences * work.mean / strategy.cp
    if strategy.cp > 1:
        most = min(most, mean)
    if strategy.pp > 1:
        most = min(most, mean / (strategy.pp * CHUNKS_PER_STAGE))
    # Samples of a prompt stay together in runs. A micro-batch may have room for a part of a run.
    run = work.samples
    loads = []
    while True:
        together = min(run, max(1, int(most / (work.per_item * work.mean)))) * work.per_item
        spared = sequences * (1 - 1 / together)
        if spared * shared.tokens < LEAST_SHARED * sequences * work.mean:
            spared = 0.0
        spared *= 1 - division.divided
        loads.append(
            Load(
                sequences,
                sequences * work.mean - spared * shared.tokens,
                sequences * work.mean_square - spared * shared.squares,
                find_busiest(run),
                division,
            )
        )
        if run == 1:
            return min(loads, key=lambda load: load.tokens * load.busiest.tokens)
        run = -(-run // 2)


def _find_division(work: CallWork, strategy: Strategy, attention_cost: float) -> Division:
    """Find how much CP ranks divide sequences."""
    cp = strategy.cp
    if cp == 1:
        return Division()
    records = records_per_rank(work, strategy)
    costs = [work.per_item * length for length in work.lengths]
    mean = records * sum(costs) / len(costs) / cp
    most = min(strategy.micro_batch_tokens / cp, mean)
    if strategy.pp > 1:
        most = min(most, mean / (strategy.pp * CHUNKS_PER_STAGE))
    few = min(records, _SAMPLE)
    return _divide_items(tuple(costs), few, mean, cp, max(1, math.ceil(most)), attention_cost / work.per_item)


@lru_cache(maxsize=4096)
def _divide_items(
    costs: tuple[int, ...], records: int, mean: float, cp: int, most: int, attention_cost: float
) -> Division:
    """Divide `records` items among `cp` ranks by `divide_pool`, as the engine does.

    `mean` is the load of a rank. If it is higher than these items cause, they stand for more items. Many items are
    easily balanced, so then an item is only divided if it does not fit into one rank.
    """
    items = [costs[(2 * i + 1) * len(costs) // (2 * records)] for i in range(records)]
    busiest = 1.0
    if mean * cp > 1.5 * sum(items):
        sizes = list_block_sizes(cp)
        shares = [(next((size for size in sizes if cost <= size * most), cp), cost) for cost in items]
    else:
        times = [tokens + attention_cost * tokens**2 for tokens in items]
        loads = [0.0] * cp
        shares = []
        for share in divide_pool(items, times, cp, most):
            shares += [(len(share.ranks), items[i]) for i in share.items]
            for rank in share.ranks:
                loads[rank] += sum(times[i] for i in share.items) / len(share.ranks)
        busiest = max(loads) * cp / sum(loads)
    divided = sum(cost for size, cost in shares if size > 1)
    exchanged = sum(cost * (size - 1) / (cp - 1) for size, cost in shares)
    return Division(divided / sum(items), exchanged / sum(items), busiest)


def records_per_rank(work: CallWork, strategy: Strategy) -> int:
    """Count the records of a mini-batch on the busiest DP rank. Raises UserError if a rank would get no record."""
    whole = work.items // work.minibatches
    if whole < strategy.dp:
        raise UserError(f"a mini-batch of {whole} records cannot be split over dp={strategy.dp}")
    return -(-whole // strategy.dp)


def estimate_saving(work: CallWork, strategy: Strategy, vpp: int, *, zero_bubble: bool) -> float:
    """Estimate the share of a call's time that `vpp` virtual stages and a zero bubble save, if all stages take the
    same time (`Stages.bubble`), and gradients of weights a third of it."""
    records = records_per_rank(work, strategy)
    full = records * work.per_item * work.mean / strategy.micro_batch_tokens
    count = min(records, max(full, CHUNKS_PER_STAGE * strategy.pp))
    left = 1 / (3 * vpp if zero_bubble else vpp)
    return (min(count, strategy.pp) - 1) * (1 - left) / (count + strategy.pp - 1)
