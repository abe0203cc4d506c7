"""How attention on a CPU lays sequences side by side (`model.packing`), without naming them."""

from collections.abc import Sequence
from dataclasses import dataclass

from realrl.layout.padding import bucket_lengths


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
        masks = sum(bucket.length**2 for bucket in buckets if bucket.dense)
        rows, long, scores = 0, 0, []
        for bucket in buckets:
            padded = len(bucket.sequences) * bucket.length
            rows += padded
            if dense and bucket.dense:
                scores.append(padded * bucket.length)
            else:
                long += padded
        tokens = sum(lengths)
        return cls(rows / tokens, long / tokens, sum(scores) / tokens, max(scores, default=0) / tokens, masks)
