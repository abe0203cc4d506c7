"""What has to move between two layouts, sorted by who holds it and who needs it."""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from itertools import pairwise, product
from math import prod
from operator import add, le

from realrl.families.tensors import Partition, TensorSpec
from realrl.layout.layout import Layout, local_tensor
from realrl.layout.region import Region

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and size of a region of a tensor that the context names."""
_Atom = tuple[Box, tuple[int, ...], tuple[int, ...]]
"""A box that neither layout cuts, and the tensor ranks of either that hold it."""


_Kind = tuple[Partition | None, tuple[int, ...]]
"""How a tensor is cut, and its shape."""


@dataclass
class Parcel:
    """Regions that the same ranks hold and the same ranks are to have, as one line of elements.

    Positions count elements from the start of the first region to the end of the last; a line is cut at the
    boundaries of rows only, so that every piece is again a list of regions.
    """

    holders: tuple[int, ...]
    targets: tuple[int, ...]
    boxes: list[tuple[str, Box]] = field(default_factory=list)
    """Tensor and box of each region. There are many and few are asked for, hence no `Region` yet."""
    starts: list[int] = field(default_factory=list)
    elements: int = 0

    def add(self, tensor: str, box: Box, elements: int) -> None:
        """Lengthen the line."""
        self.boxes.append((tensor, box))
        self.starts.append(self.elements)
        self.elements += elements

    @cached_property
    def needers(self) -> tuple[int, ...]:
        """Targets that do not hold the regions already."""
        holders = set(self.holders)
        return tuple(rank for rank in self.targets if rank not in holders)

    @cached_property
    def keepers(self) -> tuple[int, ...]:
        """Targets that hold the regions already."""
        holders = set(self.holders)
        return tuple(rank for rank in self.targets if rank in holders)

    def nearest_row(self, position: float) -> int:
        """The boundary between rows nearest to a position."""
        if position >= self.elements:
            return self.elements
        index = bisect_right(self.starts, position) - 1
        _, (_, size) = self.boxes[index]
        row, start = prod(size[1:]), self.starts[index]
        return start + round((position - start) / row) * row

    def pieces(self, begin: int, end: int) -> Iterator[Region]:
        """The regions between two boundaries."""
        for index in range(bisect_right(self.starts, begin) - 1, len(self.boxes)):
            (tensor, (offset, size)), start = self.boxes[index], self.starts[index]
            if start >= end:
                return
            row = prod(size[1:])
            first, last = max(begin - start, 0) // row, min((end - start) // row, size[0])
            yield Region(tensor, (offset[0] + first, *offset[1:]), (last - first, *size[1:]))


def parcels(source: Layout, target: Layout) -> list[Parcel]:
    """All regions of a model, cut wherever either layout cuts, by their holders and targets.

    Tensors of one shape and partition are cut alike, so that it is done once for all of them.
    """
    found: dict[tuple[tuple[int, ...], tuple[int, ...]], Parcel] = {}
    ranks_before, ranks_after = cache(partial(_ranks, source)), cache(partial(_ranks, target))
    atoms: dict[_Kind, list[_Atom]] = {}
    sorted_out: dict[tuple[_Kind, tuple[int, ...], tuple[int, ...]], list[tuple[Box, int, Parcel]]] = {}
    for spec, before, after in zip(source.specs, source.stages, target.stages, strict=True):
        kind = (spec.partition, spec.shape)
        if kind not in atoms:
            atoms[kind] = list(_atoms(_shards(source, spec), _shards(target, spec)))
        if (kind, before, after) not in sorted_out:
            by_ranks = []
            for box, ts_before, ts_after in atoms[kind]:
                ranks = ranks_before(ts_before, before), ranks_after(ts_after, after)
                by_ranks.append((box, prod(box[1]), found.setdefault(ranks, Parcel(*ranks))))
            sorted_out[kind, before, after] = by_ranks
        for box, elements, parcel in sorted_out[kind, before, after]:
            parcel.add(spec.name, box, elements)
    return list(found.values())


def _ranks(layout: Layout, ts: tuple[int, ...], stages: tuple[int, ...]) -> tuple[int, ...]:
    placement = layout.placement
    replicas = range(placement.strategy.dp)
    return tuple(placement.rank(dp=dp, tp=t, pp=stage) for stage in stages for dp in replicas for t in ts)


def _shards(layout: Layout, spec: TensorSpec) -> list[tuple[Box, int]]:
    """Per tensor rank that holds any of it, its box of a tensor."""
    tp = layout.placement.strategy.tp
    regions = [local_tensor(layout.shape, spec, tp, t).region for t in range(tp)]
    return [((region.offset, region.size), t) for t, region in enumerate(regions) if region.numel]


def _atoms(source: list[tuple[Box, int]], target: list[tuple[Box, int]]) -> Iterator[_Atom]:
    """The coarsest boxes that no shard of either side cuts, each with the tensor ranks that hold it."""
    edges = [
        sorted({edge for (offset, size), _ in source + target for edge in (offset[d], offset[d] + size[d])})
        for d in range(len(source[0][0][0]))
    ]
    for corner in product(*(pairwise(line) for line in edges)):
        low, high = tuple(a for a, _ in corner), tuple(b for _, b in corner)
        size = tuple(b - a for a, b in corner)
        yield (low, size), _covering(source, low, high), _covering(target, low, high)


def _covering(shards: list[tuple[Box, int]], low: tuple[int, ...], high: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(
        t
        for (offset, size), t in shards
        if all(map(le, offset, low)) and all(map(le, high, map(add, offset, size)))
    )
