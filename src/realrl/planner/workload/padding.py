"""Padding overhead of attention, which buckets sequences by length (`model.packing`)."""

from collections.abc import Sequence
from dataclasses import dataclass

DENSE_LENGTH = 128
"""Longest padded length whose float32 attention scores are materialised."""


@dataclass(frozen=True, kw_only=True)
class Padding:
    """Padding overhead of a set of sequences, per token unless stated otherwise."""

    rows: float = 1.0
    """Padded tokens per token."""
    long: float = 1.0
    """Padded tokens whose scores are never materialised, per token."""
    scores: float = 0.0
    """Materialised scores of one head, per token."""
    scored_at_once: float = 0.0
    """Most materialised scores of one head at a time, per token."""
    masks: int = 0
    """Elements of all attention masks, in total."""

    @classmethod
    def of(cls, lengths: Sequence[int], *, dense: bool) -> "Padding":
        """Compute the overhead of sequences with these lengths; `dense`: short ones materialise their scores."""
        buckets = bucket_lengths(lengths)
        masks = sum(length**2 for length, _ in buckets if length <= DENSE_LENGTH)
        rows = 0
        long = 0
        scores = []
        for length, count in buckets:
            rows += count * length
            if dense and length <= DENSE_LENGTH:
                scores.append(count * length**2)
            else:
                long += count * length
        tokens = sum(lengths)
        return cls(
            rows=rows / tokens,
            long=long / tokens,
            scores=sum(scores) / tokens,
            scored_at_once=max(scores, default=0) / tokens,
            masks=masks,
        )


def bucket_lengths(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Group lengths into buckets of (padded length, sequences), longest first.

    Padded lengths are multiples of 8, and lengths within a bucket differ little.
    """
    buckets: list[tuple[int, int]] = []
    shortest = 0
    for length in sorted(lengths, reverse=True):
        if not buckets or length < shortest:
            longest = -(-length // 8) * 8
            shortest = min(longest - 8, longest * 3 // 4) + 1
            buckets.append((longest, 0))
        buckets[-1] = (buckets[-1][0], buckets[-1][1] + 1)
    return buckets
