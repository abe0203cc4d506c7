"""Padding overhead of attention, which buckets sequences by length (`model.packing`)."""

from collections.abc import Sequence
from dataclasses import dataclass

from realrl.layout.padding import bucket_lengths


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
        masks = sum(bucket.length**2 for bucket in buckets if bucket.dense)
        rows = 0
        long = 0
        scores = []
        for bucket in buckets:
            padded = len(bucket.sequences) * bucket.length
            rows += padded
            if dense and bucket.dense:
                scores.append(padded * bucket.length)
            else:
                long += padded
        tokens = sum(lengths)
        return cls(
            rows=rows / tokens,
            long=long / tokens,
            scores=sum(scores) / tokens,
            scored_at_once=max(scores, default=0) / tokens,
            masks=masks,
        )
