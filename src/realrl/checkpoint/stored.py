"""Tensors of a model in the tensors of files: the same ones, or some rows of larger ones."""

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

from realrl.families.tensors import Stored, TensorSpec
from realrl.layout.region import Region

PART_ELEMENTS = 2**24
"""Elements that are read at a time: where they change their type on the way to a GPU, they are in memory twice."""


class Weights(Protocol):
    """Named tensors to write into."""

    def __getitem__(self, name: str) -> Tensor: ...


def read_parts(
    stored: Any, spec: TensorSpec, region: Region | None = None
) -> Iterator[tuple[tuple[slice, ...], Tensor]]:
    """Read a region of a tensor, or all of it, part by part: index of the part in the region, and its values.

    `stored` is the tensor of a file that holds it: something that gives parts of it when indexed, as a tensor does,
    or a slice of a safetensors file. It is asked for every element of the region once, and for no others. Values
    are views of what it gives, except for rows that have another order there.
    """
    if region is None:
        region = Region(spec.name, (0,) * len(spec.shape), spec.shape)
    if not region.numel:
        return
    rows, *columns = region.slices
    most = max(1, PART_ELEMENTS // prod(region.size[1:]))
    for first, last in _list_runs(spec.stored, rows.start, rows.stop, most):
        yield (
            (slice(first - rows.start, last - rows.start),),
            _read_rows(stored, spec.stored, first, last, columns),
        )


def _list_runs(where: Stored | None, first: int, last: int, most: int) -> Iterator[tuple[int, int]]:
    """Divide rows into runs of at most `most` that lie together in a file, but for their order."""
    together = where is None or (where.order is None and where.period == where.block)
    while first < last:
        end = last if together or where is None else min(last, (first // where.block + 1) * where.block)
        if where is None or where.order is None:
            end = min(end, first + most)
        yield first, end
        first = end


def _read_rows(stored: Any, where: Stored | None, first: int, last: int, columns: Sequence[slice]) -> Tensor:
    if where is None:
        return stored[(slice(first, last), *columns)]
    numbers = where.rows(first, last)
    start, stop = min(numbers), max(numbers) + 1
    stack = () if where.number is None else (where.number,)
    part = (
        stored[(*stack, *columns, slice(start, stop))].T
        if where.transposed
        else stored[(*stack, slice(start, stop), *columns)]
    )
    return part if where.order is None else part[torch.tensor(numbers) - start]


def join_tensors(
    specs: Sequence[TensorSpec], values: Mapping[str, Tensor], first: Mapping[str, int] | None = None
) -> dict[str, Tensor]:
    """Put tensors of a model together to those of files, by their names there. `values` are by own names.

    They are whole or, with `first`, rows from that number on, which become rows of the file's that lie together.
    `specs` may be some matrices of a stack, one after the other, which become as many of its rows.
    """
    files: dict[str, Tensor] = {}
    for group in group_by_file_tensor(specs):
        name = group[0].file_name
        stacks = group_by_number(group)
        for place, matrix in enumerate(stacks):
            rows = [_list_file_rows(spec, values, first or {}) for spec in matrix]
            for spec, own_rows in zip(matrix, rows, strict=True):
                value, where = values[spec.name].detach(), spec.stored
                if where is None:
                    files[name] = value
                    continue
                if name not in files:
                    shape = (sum(map(len, rows)), *value.shape[1:])
                    count = () if where.number is None else (len(stacks),)
                    files[name] = value.new_empty((*count, *(shape[::-1] if where.transposed else shape)))
                own = files[name] if where.number is None else files[name][place]
                numbers = torch.tensor(own_rows, device=value.device) - min(map(min, rows))
                (own.T if where.transposed else own)[numbers] = value
    return files


def _list_file_rows(
    spec: TensorSpec, values: Mapping[str, Tensor], first: Mapping[str, int]
) -> Sequence[int]:
    """List the rows of a file's tensor that the values become."""
    start = first.get(spec.name, 0)
    numbers = range(start, start + len(values[spec.name]))
    return numbers if spec.stored is None else spec.stored.rows(numbers.start, numbers.stop)


def group_by_file_tensor(specs: Sequence[TensorSpec]) -> list[list[TensorSpec]]:
    """Group tensors of a model by the tensor of a file that they are, or are a part of, in order."""
    groups: dict[str, list[TensorSpec]] = {}
    for spec in specs:
        groups.setdefault(spec.file_name, []).append(spec)
    return list(groups.values())


def group_by_number(specs: Sequence[TensorSpec]) -> list[list[TensorSpec]]:
    """Group tensors of a model that are parts of one of a file by their matrix, where that is a stack, in order."""
    groups: dict[int | None, list[TensorSpec]] = {}
    for spec in specs:
        groups.setdefault(None if spec.stored is None else spec.stored.number, []).append(spec)
    return list(groups.values())
