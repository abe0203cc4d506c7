"""Sizes of what is computed, sent or kept at a time: the engine works by them, and the planner counts with them."""

BUCKET_ELEMENTS = 2**24
"""Gradients or parameters in one collective: 64 MiB of float32, enough for full bandwidth, and few enough that
several buckets can overlap with computation."""


def bucket_count(elements: int) -> int:
    """Buckets that a flat buffer of so many elements is cut into, of equal size."""
    return max(1, round(elements / BUCKET_ELEMENTS))
