"""Counter-based sampling noise: a hash of seed, step, sequence and position instead of a generator's state."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SamplingSeed:
    """Inputs of the sampling noise that all tokens of a generate call share."""

    seed: int
    step: int
    first_sequence: int = 0
    """Number of the sequence of item 0. The sequence of item i has the number `first_sequence` + i."""
    call: int = 0
    """Index of the generate call in its graph, so that two calls draw different answers."""


def _signed(value: int) -> int:
    """Convert the low 64 bits of `value` to a two's complement number."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >= 1 << 63 else value


def _shift_right(value: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64, which fills with zeros."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    """Apply the finaliser of SplitMix64 (Steele, Lea and Flood 2014) to int64 tensors, with wrap-around."""
    x = (x ^ _shift_right(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift_right(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift_right(x, 31)


_GOLDEN = _signed(0x9E3779B97F4A7C15)


class SamplingNoise:
    """Uniform random numbers in [0, 1) for the tokens of a generate call.

    They depend only on (seed, step, sequence, position, call), so they do not change with the plan, the batch or a
    restart.
    """

    def __init__(self, seed: SamplingSeed) -> None:
        self.seed = seed

    def make_keys(self, items: Tensor) -> Tensor:
        """Compute a key for the noise of each sequence. items: int64 -> int64, of the same shape"""
        seed = self.seed
        key = _mix(torch.full_like(items, _signed(seed.seed)) + _GOLDEN)
        for part in (torch.full_like(items, seed.step), items + seed.first_sequence):
            key = _mix((key ^ part) + _GOLDEN)
        return key

    def draw(self, keys: Tensor, positions: Tensor) -> Tensor:
        """Compute the noise of the tokens at `positions` of the sequences with `keys`. int64 -> float64"""
        key = _mix((keys ^ positions) + _GOLDEN)
        if self.seed.call:
            key = _mix((key ^ self.seed.call) + _GOLDEN)
        # The upper 53 bits fill the significand of a float64.
        return _shift_right(key, 11).double() * 2.0**-53
