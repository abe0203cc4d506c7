"""Types of arrays, and functions of numbers that work on arrays."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Real = float | NDArray[Any]
"""A number, or an array with a number for each strategy. Formulas are the same for both."""


def truncate(numbers: Real) -> Ints:
    """Round to whole numbers towards 0, as `int` does."""
    return np.asarray(numbers).astype(np.int64)


def apply_each(of: Callable[[int], int], numbers: Ints) -> Ints:
    """Apply a function to each number; equal numbers share one call."""
    different, where = np.unique(numbers, return_inverse=True)
    return np.array([of(n) for n in different.tolist()])[where]
