"""Division of runs of elements into boxes: what lies back to back in memory, in terms of rows and columns."""

from collections.abc import Iterator
from math import prod


def find_boxes(
    shape: tuple[int, ...], first: int, end: int, limit: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """List boxes (offset, size) that elements `first` up to `end` of a row-major tensor of a shape consist of.

    They come in the order of memory, and each of them is one run there of at most `limit` elements.
    """
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
