"""Layout of sequences side by side, for attention on devices without a kernel for packed ones."""

from collections.abc import Sequence
from dataclasses import dataclass

DENSE_LENGTH = 128
"""Longest padded length whose float32 scores are computed whole: for short sequences twice as fast on a CPU as the
flash kernel, whose blocks they do not fill."""

_MULTIPLE = 8
"""Lengths are rounded up to multiples of it, on which small matrix products are up to a third faster."""


@dataclass(frozen=True)
class Bucket:
    """Sequences of similar length, padded at their ends to `length` each."""

    sequences: tuple[int, ...]
    """Indices of the sequences."""
    length: int

    @property
    def dense(self) -> bool:
        """Whether float32 scores are computed whole."""
        return self.length <= DENSE_LENGTH


def bucket_lengths(lengths: Sequence[int]) -> tuple[Bucket, ...]:
    """Group sequences by length, longest first, so that padding stays small."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    groups: list[tuple[int, list[int]]] = []
    shortest = 0
    for i in order:
        if not groups or lengths[i] < shortest:
            longest = -(-lengths[i] // _MULTIPLE) * _MULTIPLE
            shortest = min(longest - _MULTIPLE, longest * 3 // 4) + 1
            groups.append((longest, []))
        groups[-1][1].append(i)
    return tuple(Bucket(tuple(sequences), length) for length, sequences in groups)
