"""Group the regions to move between two layouts by the ranks that hold them and the ranks that need them."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import pairwise, product
from math import prod
from operator import add, le

from realrl.families.tensors import TensorSpec
from realrl.layout.layout import Layout
from realrl.layout.region import Region
from realrl.plan.axes import Divided, axes_dividing
from realrl.plan.placement import Placement

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and size of a region; the context names its tensor."""
Holder = int
"""Number that identifies all ranks of a stage that store the same elements. It is the lowest of their positions,
counted from the stage's first rank."""
_Shard = tuple[Box, Holder]
_Atom = tuple[Box, tuple[Holder, ...], tuple[Holder, ...]]
"""A box that neither layout cuts, with its holders in the source and in the target."""


@dataclass
class RegionGroup:
    """Regions with the same source ranks and the same target ranks, whose elements form one line. Positions count
    elements along the line. The line is cut only between rows, so that every piece is again a list of regions."""

    holders: tuple[int, ...]
    targets: tuple[int, ...]
    boxes: list[tuple[str, Box]] = field(default_factory=list)
    """Tensor and box of each region. `Region` objects are made on demand, because few of them are used."""
    starts: list[int] = field(default_factory=list)
    elements: int = 0

    def add(self, tensor: str, box: Box, elements: int) -> None:
        self.boxes.append((tensor, box))
        self.starts.append(self.elements)
        self.elements += elements

    @cached_property
    def receivers(self) -> tuple[int, ...]:
        """Targets that do not hold the regions yet."""
        holders = set(self.holders)
        return tuple(rank for rank in self.targets if rank not in holders)

    @cached_property
    def resident(self) -> tuple[int, ...]:
        """Targets that already hold the regions."""
        holders = set(self.holders)
        return tuple(rank for rank in self.targets if rank in holders)

    def nearest_row(self, position: float) -> int:
        """Round a position to the nearest row boundary."""
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
    """Group all regions of a model by their holders and targets; regions are cut at every boundary of either
    layout.

    Parameters whose tensors have the same shapes and partitions are cut alike, so each kind is cut only once.
    """
    groups: dict[tuple[tuple[int, ...], tuple[int, ...]], RegionGroup] = {}
    find_ranks = cache(_ranks)
    cuts: dict[object, list[list[_Atom]]] = {}
    boxes_by_stage: dict[object, list[list[tuple[Box, int, RegionGroup]]]] = {}
    stages = iter(zip(source.stages, target.stages, strict=True))
    for stack in source.stacks:
        kind = tuple((spec.partition, spec.shape, spec.expert) for spec in stack)
        if kind not in cuts:
            both = zip(_cut(source, stack), _cut(target, stack), strict=True)
            cuts[kind] = [list(_atoms(before, after)) for before, after in both]
        # All tensors of a parameter are on the same stages, so the stages of the first tensor are enough.
        (before, after), *_ = [next(stages) for _ in stack]
        if (kind, before, after) not in boxes_by_stage:
            boxes_by_stage[kind, before, after] = found = []
            places = source.placement_of(stack[0]), target.placement_of(stack[0])
            for atoms in cuts[kind]:
                by_ranks = []
                for box, source_holders, target_holders in atoms:
                    ranks = (
                        find_ranks(places[0], source_holders, before),
                        find_ranks(places[1], target_holders, after),
                    )
                    by_ranks.append((box, prod(box[1]), groups.setdefault(ranks, RegionGroup(*ranks))))
                found.append(by_ranks)
        for spec, by_ranks in zip(stack, boxes_by_stage[kind, before, after], strict=True):
            for box, elements, group in by_ranks:
                group.add(spec.name, box, elements)
    return list(groups.values())


def _ranks(placement: Placement, holders: tuple[Holder, ...], stages: tuple[int, ...]) -> tuple[int, ...]:
    """List all ranks that `holders` stand for on some stages."""
    degrees = placement.strategy.degrees
    copies = degrees.origins(*placement.strategy.storing_axes)  # positions of stage 0 with the same elements
    stride = degrees.stride(*axes_dividing(Divided.LAYERS))
    within = sorted(holder + copy for holder in holders for copy in copies)
    return tuple(placement.mesh.first + stage * stride + position for stage in stages for position in within)


def _cut(layout: Layout, stack: Sequence[TensorSpec]) -> list[list[_Shard]]:
    """Find the boxes into which a layout cuts each tensor of a parameter, with their holders."""
    placement = layout.placement_of(stack[0])
    layers = axes_dividing(Divided.LAYERS)
    axes = [axis for axis in placement.strategy.storing_axes if axis not in layers]
    shards: list[list[_Shard]] = [[] for _ in stack]
    for holder in placement.strategy.degrees.offsets(*axes):
        rank = placement.mesh.first + holder
        held = [(spec, found) for spec, found in zip(stack, shards, strict=True) if layout.holds(spec, rank)]
        parts = layout.cut_stored_rows([layout.cut(spec, rank) for spec, _ in held], rank)
        for (_, found), part in zip(held, parts, strict=True):
            if part.region.numel:
                found.append(((part.region.offset, part.region.size), holder))
    return shards


def _atoms(source: list[_Shard], target: list[_Shard]) -> Iterator[_Atom]:
    """Yield the largest boxes that no shard on either side cuts, with their holders."""
    rows, *columns = [
        sorted({edge for (offset, size), _ in source + target for edge in (offset[d], offset[d] + size[d])})
        for d in range(len(source[0][0][0]))
    ]
    before, after = _sort_by_rows(source, rows), _sort_by_rows(target, rows)
    for (first, last), in_source, in_target in zip(pairwise(rows), before, after, strict=True):
        for corner in product(*(pairwise(line) for line in columns)):
            low = (first, *(a for a, _ in corner))
            high = (last, *(b for _, b in corner))
            size = tuple(b - a for a, b in zip(low, high, strict=True))
            yield (low, size), _covering(in_source, low, high), _covering(in_target, low, high)


def _sort_by_rows(shards: list[_Shard], edges: list[int]) -> list[list[_Shard]]:
    """List the shards that cover the rows between each pair of neighbouring edges."""
    place = {edge: number for number, edge in enumerate(edges)}
    found: list[list[_Shard]] = [[] for _ in edges[1:]]
    for shard in shards:
        (offset, size), _ = shard
        for number in range(place[offset[0]], place[offset[0] + size[0]]):
            found[number].append(shard)
    return found


def _covering(shards: list[_Shard], low: tuple[int, ...], high: tuple[int, ...]) -> tuple[Holder, ...]:
    return tuple(
        holder
        for (offset, size), holder in shards
        if all(map(le, offset, low)) and all(map(le, high, map(add, offset, size)))
    )
