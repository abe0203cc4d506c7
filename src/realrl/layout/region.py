"""A box of one named global tensor."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True, order=True)
class Region:
    """The elements of `tensor` from `offset` up to `offset + size` in each dim.

    A size may be 0, because a rank may hold no part of a tensor that other ranks hold. Raises ValueError if
    `offset` and `size` have different lengths or negative entries.
    """

    tensor: str
    offset: tuple[int, ...]
    size: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.offset) != len(self.size):
            raise ValueError(f"region of {self.tensor}: offset {self.offset} but size {self.size}")
        if min(self.offset, default=0) < 0 or min(self.size, default=0) < 0:
            raise ValueError(f"region of {self.tensor}: negative offset {self.offset} or size {self.size}")

    @property
    def numel(self) -> int:
        return prod(self.size)

    @property
    def end(self) -> tuple[int, ...]:
        """First index after the box, per dim."""
        return tuple(o + s for o, s in zip(self.offset, self.size, strict=True))

    @property
    def slices(self) -> tuple[slice, ...]:
        """The box as an index into the global tensor."""
        return tuple(slice(a, b) for a, b in zip(self.offset, self.end, strict=True))

    def intersect(self, other: "Region") -> "Region | None":
        """Intersect with another region; None if they share no element."""
        if self.tensor != other.tensor:
            return None
        low = tuple(map(max, self.offset, other.offset))
        size = tuple(min(a, b) - c for a, b, c in zip(self.end, other.end, low, strict=True))
        return Region(self.tensor, low, size) if min(size, default=1) > 0 else None


def find_boxes(
    shape: tuple[int, ...], first: int, end: int, limit: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Divide elements `first` to `end` of a row-major tensor into boxes: (offset, size) of each, in memory order.
    Each box is contiguous in memory and has at most `limit` elements."""
    if first >= end:
        return
    if not shape[1:]:
        for start in range(first, end, limit):
            yield (start,), (min(limit, end - start),)
        return
    row = prod(shape[1:])
    top, head = divmod(first, row)
    bottom, tail = divmod(end, row)
    if top == bottom:
        yield from _within_row(shape, top, head, tail, limit)
        return
    if head or row > limit:
        yield from _within_row(shape, top, head, row, limit)
        top += 1
    if row > limit:
        for whole in range(top, bottom):
            yield from _within_row(shape, whole, 0, row, limit)
    else:
        rows = limit // row
        for start in range(top, bottom, rows):
            yield (start, *(0 for _ in shape[1:])), (min(rows, bottom - start), *shape[1:])
    yield from _within_row(shape, bottom, 0, tail, limit)


def _within_row(
    shape: tuple[int, ...], row: int, first: int, end: int, limit: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    for offset, size in find_boxes(shape[1:], first, end, limit):
        yield (row, *offset), (1, *size)
