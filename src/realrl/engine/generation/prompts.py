"""Prompts of a generate call: items that are samples of one prompt, and how they are decoded together."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from realrl.data.batch import Ragged
from realrl.data.partition import minibatch_slices
from realrl.engine.model import Model
from realrl.layout.sharing import count_rows_per_piece


@dataclass(frozen=True, eq=False)
class DistinctPrompts:
    """Prompts of B rows, each once: row i has prompt `of_row[i]`."""

    rows: Ragged
    of_row: tuple[int, ...]

    @classmethod
    def of(cls, prompts: Ragged, groups: Sequence[Sequence[int]]) -> "DistinctPrompts":
        """Take the rows of these groups one after the other; those of a group have equal prompts."""
        of_row = tuple(i for i, group in enumerate(groups) for _ in group)
        return cls(prompts.select([group[0] for group in groups]), of_row)


def group_samples(ids: Sequence[int], prompts: Ragged, samples: int) -> list[list[int]]:
    """Group the positions of items that are samples of one prompt, items i * samples to (i + 1) * samples - 1.

    Rows must be equal too: a graph may continue sequences that were sampled before.
    """
    if samples == 1:
        return [[position] for position in range(len(ids))]
    groups = defaultdict(list)
    for position, (item, row) in enumerate(zip(ids, prompts.rows(), strict=True)):
        groups[item // samples, tuple(row.tolist())].append(position)
    return list(groups.values())


def split_into_decode_batches(
    model: Model, prompts: Ragged, groups: Sequence[Sequence[int]], *, new_tokens: int, kv_capacity: int
) -> list[list[list[int]]]:
    """Split groups of rows into decode batches of at most `kv_capacity` tokens: their groups, by batch.

    A prompt counts once for all its rows in a batch, and each row has `new_tokens`. Groups that are too large are
    cut (`layout.sharing`).
    """
    size = count_rows_per_piece(
        max(map(len, groups)),
        longest=max(prompts.lengths),
        room=new_tokens,
        budget=kv_capacity,
        prompts=len(groups),
        stages=model.groups.pipeline.size,
    )
    pieces = [
        (number, [group[i] for i in part])
        for number, group in enumerate(groups)
        for part in minibatch_slices(len(group), -(-len(group) // size))
    ]
    costs = [prompts.lengths[rows[0]] + len(rows) * new_tokens for _, rows in pieces]
    # One decode batch per stage keeps a pipeline busy; more would cost time, since a decode step takes nearly the
    # same however few rows it has.
    batches = []
    for chunk in model.split_micro_batches(costs, kv_capacity, per_stage=1):
        joined: dict[int, list[int]] = {}
        for number, rows in (pieces[i] for i in chunk):
            joined.setdefault(number, []).extend(rows)
        batches.append(list(joined.values()))
    return batches
