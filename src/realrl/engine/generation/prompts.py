"""Prompts of a generate call: items that are samples of one prompt."""

from collections import defaultdict
from collections.abc import Sequence

from realrl.data.batch import Ragged


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
