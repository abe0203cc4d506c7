"""Layout of sequences side by side, for attention on a GPU whose kernel for packed ones does not take them."""

from collections.abc import Sequence
from dataclasses import dataclass

_MULTIPLE = 8
"""Lengths are rounded up to multiples of it, so that there are few buckets."""


@dataclass(frozen=True)
class Bucket:
    """Sequences of similar length, padded at their ends to `length` each."""

    sequences: tuple[int, ...]
    """Indices of the sequences."""
    length: int

    @property
    def tokens(self) -> int:
        """Tokens, padding included."""
        return len(self.sequences) * self.length


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
