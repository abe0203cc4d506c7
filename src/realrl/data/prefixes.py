"""Common beginnings of token rows, such as the prompt that several samples share.

A pass computes a common beginning only once. All functions work on the host and depend only on tokens, so all ranks
with the same rows find the same.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from torch import Tensor

from realrl.layout.limits import LEAST_SHARED


@dataclass(frozen=True)
class Prefix:
    """Beginning that neighbouring rows have in common."""

    rows: range
    tokens: int

    @property
    def saved(self) -> int:
        """Number of tokens that need not be computed."""
        return (len(self.rows) - 1) * self.tokens


def count_common_tokens(rows: Sequence[Tensor]) -> list[int]:
    """Count, for each row but the first, the tokens that it begins with like the row before. [rows - 1]"""
    arrays = [row.numpy() for row in rows]
    found = []
    for before, row in pairwise(arrays):
        size = min(len(before), len(row))
        differs = np.flatnonzero(before[:size] != row[:size])
        found.append(int(differs[0]) if len(differs) else size)
    return found


def find_prefixes(lengths: Sequence[int], common: Sequence[int]) -> list[Prefix]:
    """Find common beginnings of neighbouring rows, in the order of the rows. No row is in two of them, and every
    row has tokens of its own.

    `common`: see `count_common_tokens`. Neighbours are joined in descending order of what they have in common, as
    long as that saves more tokens. So rows that share a prompt are joined, but not the rows of two prompts that
    begin with the same few words.
    """
    first = [*range(len(lengths))]  # first row of the group that ends with this row
    last = [*range(len(lengths))]  # last row of the group that begins with this row
    shared = [0] * len(lengths)  # common tokens of the group that begins with this row
    links = [min(found, lengths[i] - 1, lengths[i + 1] - 1) for i, found in enumerate(common)]
    for link in sorted(range(len(links)), key=lambda i: -links[i]):
        start, middle, end = first[link], link + 1, last[link + 1]
        separately = (link - start) * shared[start] + (end - middle) * shared[middle]
        if (end - start) * links[link] > separately:
            first[end], last[start], shared[start] = start, end, links[link]
    found, row = [], 0
    while row < len(lengths):
        prefix = Prefix(range(row, last[row] + 1), shared[row])
        if prefix.saved >= LEAST_SHARED * sum(lengths[i] for i in prefix.rows) and prefix.saved:
            found.append(prefix)
        row = prefix.rows.stop
    return found


def select_prefixes(prefixes: Sequence[Prefix], rows: Sequence[int]) -> list[Prefix]:
    """Find the common beginnings of a selection of rows, in ascending order. The result counts selected rows."""
    found, places = [], np.asarray(rows)
    for prefix in prefixes:
        start, stop = np.searchsorted(places, (prefix.rows.start, prefix.rows.stop)).tolist()
        if stop - start > 1:
            found.append(Prefix(range(start, stop), prefix.tokens))
    return found


def find_joined(prefixes: Sequence[Prefix], count: int, of_row: Callable[[int], int]) -> list[bool]:
    """Find which of `count` items have a common beginning with the item before. `of_row`: the item of a row."""
    joined = [False] * count
    for prefix in prefixes:
        for item in range(of_row(prefix.rows.start) + 1, of_row(prefix.rows[-1]) + 1):
            joined[item] = True
    return joined
