"""What has to move between two layouts, sorted by who holds it and who needs it."""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise, product

from realrl.layout.layout import Layout, local_tensor
from realrl.layout.region import Region
from realrl.layout.tensors import TensorSpec

_Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and size of a region of a tensor that the context names."""
_Atom = tuple[_Box, tuple[int, ...], tuple[int, ...]]
"""A box that neither layout cuts, and the tensor ranks of either that hold it."""


@dataclass
class Parcel:
    """Regions that the same ranks hold and the same ranks are to have, as one line of elements.

    Positions count elements from the start of the first region to the end of the last; a line is cut at the
    boundaries of rows only, so that every piece is again a list of regions.
    """

    holders: tuple[int, ...]
    targets: tuple[int, ...]
    regions: list[Region] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    elements: int = 0

    def add(self, region: Region) -> None:
        """Lengthen the line."""
        self.regions.append(region)
        self.starts.append(self.elements)
        self.elements += region.numel

    @property
    def needers(self) -> tuple[int, ...]:
        """Targets that do not hold the regions already."""
        return tuple(rank for rank in self.targets if rank not in self.holders)

    def nearest_row(self, position: float) -> int:
        """The boundary between rows nearest to a position."""
        if position >= self.elements:
            return self.elements
        index = bisect_right(self.starts, position) - 1
        region, start = self.regions[index], self.starts[index]
        row = region.numel // region.size[0]
        return start + round((position - start) / row) * row

    def pieces(self, begin: int, end: int) -> Iterator[Region]:
        """The regions between two boundaries."""
        for index in range(bisect_right(self.starts, begin) - 1, len(self.regions)):
            region, start = self.regions[index], self.starts[index]
            if start >= end:
                return
            first, last = max(begin - start, 0), min(end - start, region.numel)
            if last - first == region.numel:
                yield region
                continue
            row = region.numel // region.size[0]
            offset = (region.offset[0] + first // row, *region.offset[1:])
            yield Region(region.tensor, offset, ((last - first) // row, *region.size[1:]))


def parcels(source: Layout, target: Layout) -> list[Parcel]:
    """All regions of a model, cut wherever either layout cuts, by their holders and targets.

    Tensors that differ only in the layer they belong to are cut alike, so that it is done once for all of them.
    """
    found: dict[tuple[tuple[int, ...], tuple[int, ...]], Parcel] = {}
    atoms: dict[str, list[_Atom]] = {}
    sorted_out: dict[tuple[str, tuple[int, ...], tuple[int, ...]], list[tuple[_Box, Parcel]]] = {}
    for spec, before, after in zip(source.specs, source.stages, target.stages, strict=True):
        kind = spec.name if spec.layer is None else spec.name.split(".", 3)[3]
        if kind not in atoms:
            atoms[kind] = list(_atoms(_shards(source, spec), _shards(target, spec)))
        if (kind, before, after) not in sorted_out:
            by_ranks = []
            for box, *ts in atoms[kind]:
                ranks = _ranks(source, ts[0], before), _ranks(target, ts[1], after)
                by_ranks.append((box, found.setdefault(ranks, Parcel(*ranks))))
            sorted_out[kind, before, after] = by_ranks
        for (offset, size), parcel in sorted_out[kind, before, after]:
            parcel.add(Region(spec.name, offset, size))
    return list(found.values())


def _ranks(layout: Layout, ts: tuple[int, ...], stages: tuple[int, ...]) -> tuple[int, ...]:
    placement = layout.placement
    replicas = range(placement.strategy.dp)
    return tuple(placement.rank(dp=dp, tp=t, pp=stage) for stage in stages for dp in replicas for t in ts)


def _shards(layout: Layout, spec: TensorSpec) -> list[tuple[_Box, int]]:
    """Per tensor rank that holds any of it, its box of a tensor."""
    tp = layout.placement.strategy.tp
    regions = [local_tensor(layout.shape, spec, tp, t).region for t in range(tp)]
    return [((region.offset, region.size), t) for t, region in enumerate(regions) if region.numel]


def _atoms(source: list[tuple[_Box, int]], target: list[tuple[_Box, int]]) -> Iterator[_Atom]:
    """The coarsest boxes that no shard of either side cuts, each with the tensor ranks that hold it."""
    edges = [
        sorted({edge for (offset, size), _ in source + target for edge in (offset[d], offset[d] + size[d])})
        for d in range(len(source[0][0][0]))
    ]
    for corner in product(*(pairwise(line) for line in edges)):
        low, high = tuple(a for a, _ in corner), tuple(b for _, b in corner)
        size = tuple(b - a for a, b in corner)
        yield (low, size), _covering(source, low, high), _covering(target, low, high)


def _covering(shards: list[tuple[_Box, int]], low: tuple[int, ...], high: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(
        t
        for (offset, size), t in shards
        if all(o <= a and b <= o + s for o, s, a, b in zip(offset, size, low, high, strict=True))
    )
