"""How attention on a CPU lays sequences side by side (`model.packing`), without naming them."""

from collections.abc import Sequence
from dataclasses import dataclass

DENSE_LENGTH = 128
"""Up to this length float32 scores are computed whole."""


@dataclass(frozen=True)
class Padding:
    """Numbers per token of some sequences, where nothing else is said."""

    rows: float = 1.0
    """Padded tokens."""
    long: float = 1.0
    """Of them, those whose scores are never stored."""
    scores: float = 0.0
    """Stored scores of one head, of all tokens."""
    scored_at_once: float = 0.0
    """Of those, the most that are computed together."""
    masks: int = 0
    """Numbers, all together, that say which keys a query sees."""

    @classmethod
    def of(cls, lengths: Sequence[int], *, dense: bool) -> "Padding":
        """That of sequences with these lengths; `dense` where short ones may have their scores stored."""
        buckets = bucket_lengths(lengths)
        masks = sum(length**2 for length, _ in buckets if length <= DENSE_LENGTH)
        rows, long, scores = 0, 0, []
        for length, count in buckets:
            rows += count * length
            if dense and length <= DENSE_LENGTH:
                scores.append(count * length**2)
            else:
                long += count * length
        tokens = sum(lengths)
        return cls(rows / tokens, long / tokens, sum(scores) / tokens, max(scores, default=0) / tokens, masks)


def bucket_lengths(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """(padded length, sequences), longest first: multiples of 8, with little difference within a bucket."""
    found: list[tuple[int, int]] = []
    shortest = 0
    for length in sorted(lengths, reverse=True):
        if not found or length < shortest:
            longest = -(-length // 8) * 8
            shortest = min(longest - 8, longest * 3 // 4) + 1
            found.append((longest, 0))
        found[-1] = (found[-1][0], found[-1][1] + 1)
    return found
