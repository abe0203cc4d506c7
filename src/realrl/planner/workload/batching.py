"""How a call's sequences are split over ranks and into micro-batches, without naming them."""

import math
from dataclasses import dataclass

from realrl.config.errors import UserError
from realrl.plan.placement import Strategy
from realrl.planner.workload.workload import CallWork


@dataclass(frozen=True)
class Fullest:
    """The chunk that needs most memory: it has as many tokens as any, and the longest sequences."""

    sequences: float
    lengths: tuple[int, ...]
    """A sample of what is passed through the model at once."""

    @property
    def tokens(self) -> float:
        """Of the sequences as they are passed through the model at once."""
        return self.sequences * sum(self.lengths) / len(self.lengths)


@dataclass(frozen=True)
class Chunks:
    """What one data-parallel rank does at a time, several times in a row: all chunks are taken to be equal, where
    it is not their memory that counts."""

    count: int
    sequences: float
    """Of one chunk, on the busiest rank."""
    tokens: float
    squares: float
    """Sum of the squared lengths."""
    fullest: Fullest


def split_work(work: CallWork, strategy: Strategy, per_stage: int) -> Chunks:
    """Micro-batches of one mini-batch, or continuations, as `engine.model.Model.split` makes them.

    At most `micro_batch_tokens` tokens, counting for generation those that the cache has room for. `tokens` and
    `squares` are those of what is passed through the model at once: of generation, the prompts. UserError where a
    rank would get no record.

    The sequences of a record stay together. The longest records come first. Those of one length fill chunks evenly;
    short ones fill the gaps that long ones leave, so that all chunks but the last are as full as can be, near
    enough. Of a pipeline all are equally full, and there are about `per_stage` for each stage, or equally many
    more for each.
    """
    records = records_per_rank(work, strategy)
    costs = sorted((work.per_item * (length + work.room) for length in work.lengths), reverse=True)
    mean, longest = sum(costs) / len(costs), costs[0]
    total, budget, alike = mean * records, strategy.micro_batch_tokens, longest == costs[-1]
    if alike:
        count = math.ceil(records / max(1, budget // longest))
    else:
        alone = sum(cost > budget for cost in costs) / len(costs) * records
        rest = sum(cost for cost in costs if cost <= budget) / len(costs) * records
        count = max(1, min(records, round(alone) - int(-rest // budget)))
    if strategy.pp > 1:
        count = min(records, math.ceil(max(count / strategy.pp, per_stage)) * strategy.pp)
        budget = min(budget, max(longest, math.ceil(math.ceil(records / count) * mean)))
        # As many could be no smaller where records are so few, or one of them so long.
        enough = records / max(1, budget // longest) if alike else total / budget
        count = min(count, math.ceil(enough))
    first = costs[: math.ceil(len(costs) / count)]
    if alike:
        most: float = min(records, max(1, budget // longest))
    else:
        most = max(longest, min(total, budget)) * len(first) / sum(first)
    long = tuple(cost // work.per_item - work.room for cost in first)
    part = records * work.per_item / count
    fullest = Fullest(most * work.per_item, long)
    return Chunks(count, part, part * work.mean, part * work.mean_square, fullest)


def records_per_rank(work: CallWork, strategy: Strategy) -> int:
    """Records of a mini-batch on the rank that gets most."""
    whole = work.items // work.minibatches
    if whole < strategy.dp:
        raise UserError(f"a mini-batch of {whole} records cannot be split over dp={strategy.dp}")
    return -(-whole // strategy.dp)
