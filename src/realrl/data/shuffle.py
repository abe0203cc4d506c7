"""Permutations that are functions of a seed, equal on every rank, restart and version of numpy."""

import numpy as np


def permute(size: int, *, seed: int, stream: int) -> np.ndarray:
    """Permute 0..size-1. int64 [size]. Streams of one seed are independent of each other.

    Only the raw output of a numpy bit generator is promised to stay the same between versions; what
    `Generator` makes of it is not.
    """
    key = np.array([seed % 2**64, stream], dtype=np.uint64)
    keys = np.random.Philox(key=key).random_raw(size)
    return np.argsort(keys, kind="stable")
