"""Types of arrays, and tables with a row for each pipeline stage."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Real = float | NDArray[Any]
"""A number, or an array with a number for each strategy. Formulas are the same for both."""


def tabulate_stages(of: Callable[[int], Sequence[int]], pp: Ints) -> Ints:
    """Tabulate a number for each pipeline stage, [stages, strategies]. Entries past the last stage are 0.

    `of(degree)` returns the numbers of all stages under a PP degree.
    """
    degrees, where = np.unique(pp, return_inverse=True)
    table = np.zeros((len(degrees), int(degrees[-1])), dtype=np.int64)
    for row, degree in zip(table, degrees.tolist(), strict=True):
        row[:degree] = of(degree)
    return table[where].T


def truncate(numbers: Real) -> Ints:
    """Round to whole numbers towards 0, as `int` does."""
    return np.asarray(numbers).astype(np.int64)


def apply_each(of: Callable[[int], int], numbers: Ints) -> Ints:
    """Apply a function to each number; equal numbers share one call."""
    different, where = np.unique(numbers, return_inverse=True)
    return np.array([of(n) for n in different.tolist()])[where]
