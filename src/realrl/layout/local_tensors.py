"""The part of a global tensor that one rank stores: a tensor-parallel part, or rows of it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from realrl.families.shape import ModelShape
from realrl.families.tensors import TensorSpec, Units
from realrl.layout.ranges import find_elements, padded_vocabulary
from realrl.layout.region import Region


@dataclass(frozen=True)
class LocalTensor:
    """A tensor as one rank stores it.

    `shape` is the allocated shape. `region` is the part of the global tensor that fills the allocated tensor, from
    its first row on. The region has the same columns. It has fewer rows only if a vocabulary or a ZeRO-3 shard is
    padded.
    """

    spec: TensorSpec
    """The global tensor."""
    region: Region
    shape: tuple[int, ...]

    @property
    def stored(self) -> TensorSpec:
        """The tensor's description, with the allocated shape."""
        return replace(self.spec, shape=self.shape)

    @property
    def numel(self) -> int:
        """Number of allocated elements."""
        return prod(self.shape)

    def take_rows(self, first: int, last: int) -> "LocalTensor":
        """Take the allocated rows from `first` up to, not including, `last`."""
        (top, *columns), (filled, *widths) = self.region.offset, self.region.size
        start, stop = min(first, filled), min(last, filled)
        region = Region(self.region.tensor, (top + start, *columns), (stop - start, *widths))
        return LocalTensor(self.spec, region, (last - first, *self.shape[1:]))


def local_tensor(shape: ModelShape, spec: TensorSpec, parts: int, index: int) -> LocalTensor:
    """Compute part `index` of a tensor that its partition divides into `parts`. A tensor without a partition is a
    single part. Tensors are cut as in Megatron-LM (arXiv 1909.08053)."""
    offset, size = [0] * len(spec.shape), list(spec.shape)
    stored = list(spec.shape)
    if spec.partition is not None:
        dim, units = spec.partition.dim, spec.partition.units
        part = find_elements(shape, units, spec.shape[dim], parts, index)
        offset[dim] = part.start
        size[dim] = stored[dim] = len(part)
        if units is Units.VOCABULARY:
            stored[dim] = padded_vocabulary(shape, parts)
    return LocalTensor(spec=spec, region=Region(spec.name, tuple(offset), tuple(size)), shape=tuple(stored))


def count_shard_rows(stack: Sequence[LocalTensor], parts: int) -> int:
    """Count the rows of a parameter that each data-parallel rank stores. The tensors of the parameter are stacked
    by rows. All ranks store the same number of rows, so that collectives can concatenate them; the last ranks may
    have padding."""
    return -(-sum(tensor.shape[0] for tensor in stack) // parts)


def cut_rows(stack: Sequence[LocalTensor], parts: int, index: int) -> tuple[LocalTensor, ...]:
    """Cut out the rows of a parameter that data-parallel rank `index` stores. The tensors of the parameter are
    stacked by rows.

    The rows are consecutive in the stack, so they form one box of each tensor; this box may be empty. Padding is at
    the end.
    """
    height = count_shard_rows(stack, parts)
    found, at = [], 0
    for tensor in stack:
        rows = tensor.shape[0]
        first, last = (min(max(edge - at, 0), rows) for edge in (index * height, (index + 1) * height))
        found.append(tensor.take_rows(first, last))
        at += rows
    padding = height - sum(tensor.shape[0] for tensor in found)
    last_one = found[-1]
    found[-1] = replace(last_one, shape=(last_one.shape[0] + padding, *last_one.shape[1:]))
    return tuple(found)
