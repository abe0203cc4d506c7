"""Regions to move between two layouts, grouped by the ranks that hold them and the ranks that need them."""

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
"""Offset and size of a region; the context names its tensor."""
_Atom = tuple[Box, tuple[int, ...], tuple[int, ...]]
"""A box that neither layout cuts, and the TP ranks that hold it in the source and in the target."""


_Kind = tuple[Partition | None, tuple[int, ...]]
"""Partition of a tensor, and its shape."""


@dataclass
class RegionGroup:
    """Regions with the same source ranks and the same target ranks, as one line of elements.

    Positions count elements from the start of the first region to the end of the last; a line is cut at the
    boundaries of rows only, so that every piece is again a list of regions.
    """

    holders: tuple[int, ...]
    targets: tuple[int, ...]
    boxes: list[tuple[str, Box]] = field(default_factory=list)
    """Tensor and box of each region; `Region` objects are made on demand, because few of many are used."""
    starts: list[int] = field(default_factory=list)
    elements: int = 0

    def add(self, tensor: str, box: Box, elements: int) -> None:
        """Append a region to the line."""
        self.boxes.append((tensor, box))
        self.starts.append(self.elements)
        self.elements += elements

    @cached_property
    def receivers(self) -> tuple[int, ...]:
        """Targets that do not hold the regions already."""
        holders = set(self.holders)
        return tuple(rank for rank in self.targets if rank not in holders)

    @cached_property
    def resident(self) -> tuple[int, ...]:
        """Targets that hold the regions already."""
        holders = set(self.holders)
        return tuple(rank for rank in self.targets if rank in holders)

    def nearest_row(self, position: float) -> int:
        """Round a position to the nearest boundary between rows."""
        if position >= self.elements:
            return self.elements
        index = bisect_right(self.starts, position) - 1
        _, (_, size) = self.boxes[index]
        row = prod(size[1:])
        start = self.starts[index]
        return start + round((position - start) / row) * row

    def pieces(self, begin: int, end: int) -> Iterator[Region]:
        """Yield the regions between two row boundaries."""
        for index in range(bisect_right(self.starts, begin) - 1, len(self.boxes)):
            (tensor, (offset, size)), start = self.boxes[index], self.starts[index]
            if start >= end:
                return
            row = prod(size[1:])
            first = max(begin - start, 0) // row
            last = min((end - start) // row, size[0])
            yield Region(tensor, (offset[0] + first, *offset[1:]), (last - first, *size[1:]))


def group_regions(source: Layout, target: Layout) -> list[RegionGroup]:
    """Group all regions of a model, cut wherever either layout cuts, by their holders and targets.

    Tensors of one shape and partition are cut alike, so each kind of tensor is cut once.
    """
    groups: dict[tuple[tuple[int, ...], tuple[int, ...]], RegionGroup] = {}
    source_ranks = cache(partial(_ranks, source))
    target_ranks = cache(partial(_ranks, target))
    atoms: dict[_Kind, list[_Atom]] = {}
    boxes_by_stage: dict[
        tuple[_Kind, tuple[int, ...], tuple[int, ...]], list[tuple[Box, int, RegionGroup]]
    ] = {}
    for spec, before, after in zip(source.specs, source.stages, target.stages, strict=True):
        kind = (spec.partition, spec.shape)
        if kind not in atoms:
            atoms[kind] = list(_atoms(_shards(source, spec), _shards(target, spec)))
        if (kind, before, after) not in boxes_by_stage:
            by_ranks = []
            for box, source_tps, target_tps in atoms[kind]:
                ranks = source_ranks(source_tps, before), target_ranks(target_tps, after)
                by_ranks.append((box, prod(box[1]), groups.setdefault(ranks, RegionGroup(*ranks))))
            boxes_by_stage[kind, before, after] = by_ranks
        for box, elements, group in boxes_by_stage[kind, before, after]:
            group.add(spec.name, box, elements)
    return list(groups.values())


def _ranks(layout: Layout, ts: tuple[int, ...], stages: tuple[int, ...]) -> tuple[int, ...]:
    placement = layout.placement
    replicas = range(placement.strategy.dp)
    return tuple(placement.rank(dp=dp, tp=t, pp=stage) for stage in stages for dp in replicas for t in ts)


def _shards(layout: Layout, spec: TensorSpec) -> list[tuple[Box, int]]:
    """Box of a tensor on each TP rank that holds a part of it."""
    tp = layout.placement.strategy.tp
    regions = [local_tensor(layout.shape, spec, tp, t).region for t in range(tp)]
    return [((region.offset, region.size), t) for t, region in enumerate(regions) if region.numel]


def _atoms(source: list[tuple[Box, int]], target: list[tuple[Box, int]]) -> Iterator[_Atom]:
    """Coarsest boxes that no shard of either side cuts, each with the TP ranks that hold it."""
    edges = [
        sorted({edge for (offset, size), _ in source + target for edge in (offset[d], offset[d] + size[d])})
        for d in range(len(source[0][0][0]))
    ]
    for corner in product(*(pairwise(line) for line in edges)):
        low = tuple(a for a, _ in corner)
        high = tuple(b for _, b in corner)
        size = tuple(b - a for a, b in corner)
        yield (low, size), _covering(source, low, high), _covering(target, low, high)


def _covering(shards: list[tuple[Box, int]], low: tuple[int, ...], high: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(
        t
        for (offset, size), t in shards
        if all(map(le, offset, low)) and all(map(le, high, map(add, offset, size)))
    )
