"""Work of a generate call on one rank: its KV cache, the rows that are decoded at the same time, and prefill
passes."""

import math
from dataclasses import dataclass, replace
from typing import Any

from realrl.layout.kv_blocks import (
    BLOCK_TOKENS,
    EXPECTED_SHARE,
    REPLACED_TOGETHER,
    CacheSize,
    count_blocks,
    count_prefill_tokens,
    count_prompt_blocks,
    size_cache,
)
from realrl.plan.placement import Strategy
from realrl.planner.workload.batching import Chunks, PeakChunk, records_per_rank, split_each
from realrl.planner.workload.strategies import Strategies
from realrl.planner.workload.workload import CallWork


@dataclass(frozen=True, kw_only=True)
class GenerationRows:
    """Rows of a generate call on the busiest rank, and how they are decoded.

    Fields are numbers for one strategy, or arrays for many (`split_generations`).
    """

    rows: Any
    prompts: Any
    """Number of distinct prompts of these rows."""
    cache: CacheSize
    together: Any
    """Number of data-parallel ranks that decode in step. The CP ranks of each of them have the same rows."""
    batches: Any
    """Number of decode batches in flight, at most one per pipeline stage. The rows that are decoded at the same
    time are divided among these batches."""

    @property
    def rows_per_batch(self) -> Any:
        return -(-self.cache.rows // self.batches)


@dataclass(frozen=True, kw_only=True)
class GenerationWork(GenerationRows):
    """Rows of a generate call on the busiest rank, and how they are processed."""

    passes: Chunks
    """Forward passes that prefill the prompts."""


def split_generations(work: CallWork, strategies: Strategies, *, cpu: bool) -> GenerationWork:
    """Split a generate call under each strategy (`split_generation`)."""
    return split_each(strategies, lambda strategy: split_generation(work, strategy, cpu=cpu))


def split_generation(work: CallWork, strategy: Strategy, *, cpu: bool) -> GenerationWork:
    """Split a generate call as `engine.generation` does. Raises UserError if a rank would get no record.

    Times assume no preemption: if continuations have their expected mean length, the cache has room for all
    admitted rows. If longer continuations could overflow the cache, peak memory includes a preempted row that is
    prefilled again.

    CP ranks have the same rows, and divide the tokens of each block of the cache and of each prefill.
    """
    items = records_per_rank(work, strategy)
    rows = items * work.per_item
    prompts = math.ceil(items / work.samples) * work.per_item
    block_tokens = BLOCK_TOKENS * strategy.cp
    cache = size_cache(
        strategy.pp * strategy.micro_batch_tokens,
        prompt_blocks=prompts * _count_mean_blocks(work, block_tokens),
        longest_prompt=max(work.lengths),
        rows=rows,
        new_tokens=work.room,
        block_tokens=block_tokens,
    )
    sizes = GenerationRows(
        rows=rows,
        prompts=prompts,
        cache=cache,
        together=strategy.replicas_in_step,
        batches=min(strategy.pp, cache.rows),
    )
    passes = _split_prompts(work, sizes, count_prefill_tokens(cpu=cpu))
    # All CP ranks divide every pass, even if its prompts are short.
    divided = float(strategy.cp > 1)
    return GenerationWork(**vars(sizes), passes=replace(passes, divided=divided, exchanged=divided))


def _count_mean_blocks(work: CallWork, block_tokens: int) -> float:
    """Count the blocks that the rows of a prompt share, in the mean over prompts."""
    return sum(count_prompt_blocks(n, block_tokens=block_tokens) for n in work.lengths) / len(work.lengths)


def _split_prompts(work: CallWork, sizes: GenerationRows, budget: int) -> Chunks:
    """Split prompts into forward passes of at most `budget` tokens, the longest prompts first.

    Ranks that decode in step begin together, but replace rows at different times, and all of them wait for each
    prefill.
    """
    # The last token of a prompt is the input of the first decode step, so it is not prefilled.
    lengths = sorted((max(1, length - 1) for length in work.lengths), reverse=True)
    mean = sum(lengths) / len(lengths)
    prompts = sizes.prompts
    each = prompts / sizes.rows
    # `begun` prompts start the decode batches. The first pass prefills those that fill the slots of one batch.
    begun = _count_first_prompts(work, sizes)
    first = max(1.0, min(begun, sizes.rows_per_batch * each))
    later = max(1.0, first / REPLACED_TOGETHER)
    rest = max(0.0, prompts - begun)
    passes = max(sizes.batches, begun * mean / budget)
    passes += sizes.together * max(rest / later, rest * mean / budget)
    passes = max(1, math.ceil(passes))
    longest = lengths[: max(1, math.ceil(len(lengths) * first / prompts))]
    together = max(1.0, min(math.ceil(first), budget * len(longest) / max(1, sum(longest))))
    block_tokens = sizes.cache.block_tokens
    blocks = _count_mean_blocks(work, block_tokens)
    most = count_blocks(work.room, block_tokens=block_tokens)
    peak = PeakChunk(together, tuple(max(1, n) for n in longest))
    again = longest[0] + math.ceil(EXPECTED_SHARE * work.room)
    preempts = sizes.cache.rows * (each * blocks + most) > sizes.cache.blocks
    least = count_prompt_blocks(longest[0] + 1, block_tokens=block_tokens) + min(2, most)
    fits = (together + 1) * least <= sizes.cache.blocks / sizes.batches
    if preempts and work.samples > 1 and fits:
        # A preempted row is prefilled together with new rows if their prompts fit into the cache as well.
        peak = PeakChunk(together + again * together / max(1.0, peak.tokens), peak.lengths)
    elif preempts and peak.tokens < again:
        peak = PeakChunk(1, (again,))
    return Chunks(
        count=passes,
        tokens=prompts * mean / passes,
        squares=prompts * sum(n * n for n in lengths) / len(lengths) / passes,
        peak=peak,
    )


def _count_first_prompts(work: CallWork, sizes: GenerationRows) -> float:
    """Count the prompts with which all decode batches begin. Slots and cache blocks limit them, and the longest
    prompts come first."""
    lengths = sorted(work.lengths, reverse=True)
    together = sizes.rows / sizes.prompts
    # Each row begins with one block of its own, and the engine keeps a second one free for it.
    block_tokens = sizes.cache.block_tokens
    own = together * min(2, count_blocks(work.room, block_tokens=block_tokens))
    found, needed = 0.0, 0.0
    for length in lengths:
        each = sizes.prompts / len(lengths)
        blocks = count_prompt_blocks(length, block_tokens=block_tokens) + own
        room = (sizes.cache.blocks - needed) / blocks
        found += min(each, max(0.0, room))
        needed += each * blocks
        if room < each:
            break
    return max(1.0, min(found, sizes.cache.rows / together))
