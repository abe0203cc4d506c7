"""How a call's sequences are split over ranks and into micro-batches, without naming them."""

from dataclasses import dataclass

from realrl.config.errors import UserError
from realrl.plan.placement import Strategy
from realrl.planner.workload import CallWork


@dataclass(frozen=True)
class Chunks:
    """What one data-parallel rank does at a time, several times in a row: all chunks are taken to be equal."""

    count: int
    sequences: float
    """Of one chunk, on the busiest rank."""
    tokens: float
    squares: float
    """Sum of the squared lengths."""


def pass_chunks(work: CallWork, strategy: Strategy, per_stage: int) -> Chunks:
    """Micro-batches of one mini-batch.

    As `engine.model.Model.split`: at most `micro_batch_tokens` tokens, and in a pipeline `per_stage` per stage
    where there are sequences enough. UserError where a rank would get no sequence.
    """
    sequences = _per_rank(work, strategy)
    count = _count(work.lengths, sequences, strategy, per_stage)
    part = sequences / count
    return Chunks(count, part, part * work.mean, part * work.mean_square)


def generation_chunks(work: CallWork, strategy: Strategy, per_stage: int) -> Chunks:
    """Continuations: at most `micro_batch_tokens` tokens of cache, whose rows have room for the longest answer.

    `tokens` and `squares` are those of the prompts.
    """
    sequences = _per_rank(work, strategy)
    costs = [length + work.room for length in work.lengths]
    count = _count(costs, sequences, strategy, per_stage)
    part = sequences / count
    return Chunks(count, part, part * work.mean, part * work.mean_square)


def _per_rank(work: CallWork, strategy: Strategy) -> int:
    """Sequences of a mini-batch on the rank that gets most."""
    whole = work.sequences // work.minibatches
    if whole < strategy.dp:
        raise UserError(f"a mini-batch of {whole} sequences cannot be split over dp={strategy.dp}")
    return -(-whole // strategy.dp)


def _count(costs: tuple[int, ...] | list[int], sequences: int, strategy: Strategy, per_stage: int) -> int:
    """Groups that the longest-first packing of `data.partition.micro_batches` makes, near enough.

    Sequences of one length fill groups evenly; short ones fill the gaps that long ones leave.
    """
    mean, longest = sum(costs) / len(costs), max(costs)
    total, budget = mean * sequences, strategy.micro_batch_tokens
    if strategy.pp > 1:
        budget = min(budget, max(longest, -(-int(total) // (per_stage * strategy.pp))))
    if longest == costs[0] == mean:
        return -(-sequences // max(1, budget // longest))
    alone = sum(cost > budget for cost in costs) / len(costs) * sequences
    rest = sum(cost for cost in costs if cost <= budget) / len(costs) * sequences
    return max(1, min(sequences, round(alone) - int(-rest // budget)))
