"""Convert the tensors of a model to the tensors of its files, and back.

One tensor of a file may hold several tensors of the model: as groups of rows, as alternating blocks of rows, or as
the matrices of a stack.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

from realrl.families.quantisation import LARGEST, name_scale
from realrl.families.tensors import EXACT_PARTS, Quantisation, Stored, TensorSpec
from realrl.layout.region import Region

PART_ELEMENTS = 2**24
"""Maximum elements read at a time. While a part's dtype is converted on the way to a GPU, it is in memory twice."""


class Weights(Protocol):
    """Named tensors."""

    def __getitem__(self, name: str) -> Tensor: ...


def read_parts(
    stored: Any, spec: TensorSpec, region: Region | None = None
) -> Iterator[tuple[tuple[slice, ...], Tensor]]:
    """Read a tensor, or a region of it, part by part. Yields each part's index within the region, and its values.

    `stored` is the file's tensor: a tensor in memory, or a slice object of safetensors. Every element of the region
    is read once, and nothing else is read. Values are views of what `stored` returns, unless the file has the rows
    in another order.
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
    """Divide rows into runs that are adjacent in the file.

    A run has at most `most` rows. If the file reorders the rows of a block, the run has the whole block.
    """
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
    if where.exact:
        return split_exactly(stored[first:last])[:, *columns]
    numbers = where.rows(first, last)
    columns = [where.columns(part.start, part.stop) for part in columns]
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
    """Join tensors of a model to tensors of files.

    Names in `values` are the model's; names in the result are the file's.

    Without `first`, values are whole tensors. With `first`, the value of a tensor holds consecutive rows that begin
    with row `first[name]`. These rows must be adjacent in the file too. If `specs` are consecutive matrices of a
    stack, the result is this part of the stack.
    """
    files: dict[str, Tensor] = {}
    for group in group_by_file_tensor(specs):
        name = group[0].file_name
        stacks = group_by_number(group)
        for place, matrix in enumerate(stacks):
            rows = [_list_file_rows(spec, values, first or {}) for spec in matrix]
            for spec, own_rows in zip(matrix, rows, strict=True):
                value, where = values[spec.name].detach(), spec.stored
                if where is None or where.exact:
                    files[name] = value if where is None else value.float().sum(1)
                    continue
                if name not in files and first is None:
                    files[name] = value.new_empty(where.shape)
                elif name not in files:
                    shape = (sum(map(len, rows)), *value.shape[1:])
                    count = () if where.number is None else (len(stacks),)
                    files[name] = value.new_empty((*count, *(shape[::-1] if where.transposed else shape)))
                own = files[name] if where.number is None else files[name][place]
                numbers = torch.tensor(own_rows, device=value.device) - min(map(min, rows))
                columns = (where.columns(0, width) for width in value.shape[1:])
                index: tuple[Any, ...] = (numbers, *columns)
                (own.T if where.transposed else own)[index] = value
    return files


def split_exactly(numbers: Tensor) -> Tensor:
    """Split float32 numbers into bfloat16 numbers with the same sum, largest first. [N] -> [N, EXACT_PARTS]
    float32"""
    rest, parts = numbers.float(), []
    for _ in range(EXACT_PARTS):
        parts.append(rest.bfloat16().float())
        rest = rest - parts[-1]
    return torch.stack(parts, 1)


def _list_file_rows(
    spec: TensorSpec, values: Mapping[str, Tensor], first: Mapping[str, int]
) -> Sequence[int]:
    """List the numbers that the rows of the values have in the file."""
    start = first.get(spec.name, 0)
    numbers = range(start, start + len(values[spec.name]))
    return numbers if spec.stored is None else spec.stored.rows(numbers.start, numbers.stop)


def group_by_file_tensor(specs: Sequence[TensorSpec]) -> list[list[TensorSpec]]:
    """Group tensors of a model by the tensor of the file that contains them, in order."""
    groups: dict[str, list[TensorSpec]] = {}
    for spec in specs:
        groups.setdefault(spec.file_name, []).append(spec)
    return list(groups.values())


def group_by_number(specs: Sequence[TensorSpec]) -> list[list[TensorSpec]]:
    """Group the tensors in one tensor of a file, in order.

    Each matrix of a stack is a group; otherwise all are one group.
    """
    groups: dict[int | None, list[TensorSpec]] = {}
    for spec in specs:
        groups.setdefault(None if spec.stored is None else spec.stored.number, []).append(spec)
    return list(groups.values())


def read_grown(
    stored: Any, spec: TensorSpec, region: Region | None, rows: int
) -> Iterator[tuple[tuple[slice, ...], Tensor]]:
    """Read a region of a tensor like `read_parts`, from a file that has only the tensor's first `rows` rows.

    Each new row is the mean of the file's rows, as in `resize_token_embeddings` of transformers, but without added
    noise. The values then depend on the file alone, so every layout reads the same values.
    """
    whole = region or _whole(spec)
    old = take_stored(spec, region, rows)
    yield from read_parts(stored, spec, old)
    if old.size[0] < whole.size[0]:
        columns = Region(spec.name, (0, *whole.offset[1:]), (rows, *whole.size[1:]))
        total = torch.zeros(whole.size[1:], dtype=torch.float64)
        for _, values in read_parts(stored, spec, columns):
            total += values.double().sum(dim=0)
        new = (whole.size[0] - old.size[0], *whole.size[1:])
        yield (slice(old.size[0], whole.size[0]),), (total / rows).float().expand(new)


def take_stored(spec: TensorSpec, region: Region | None, rows: int) -> Region:
    """Cut a region to the rows that a file with `rows` rows has. The result may be empty."""
    whole = region or _whole(spec)
    count = max(0, min(whole.size[0], rows - whole.offset[0]))
    return Region(spec.name, whole.offset, (count, *whole.size[1:]))


def _whole(spec: TensorSpec) -> Region:
    return Region(spec.name, (0,) * len(spec.shape), spec.shape)


def quantise(values: Tensor, quantisation: Quantisation) -> tuple[Tensor, Tensor]:
    """Quantise whole rows of weights w to numbers q and scales s, so that w is about q * s.

    The scale of a row is s = max|row| / (largest number of the type), or 1 for a row of zeros. `values` has shape
    [N, K]. Returns the bytes of q, [N, K] uint8, and the bytes of s, [N, 4] uint8.
    """
    wide = values.float()
    scales = wide.abs().amax(1, keepdim=True) / LARGEST[quantisation]
    scales = torch.where(scales > 0, scales, 1.0)
    # Division rounds, so without the clamp the largest value could leave the range of the type.
    wide = (wide / scales).clamp_(-LARGEST[quantisation], LARGEST[quantisation])
    found = wide.round_().to(torch.int8) if quantisation == "int8" else wide.to(torch.float8_e4m3fn)
    return found.view(torch.uint8), scales.view(torch.uint8)


def write_quantised(into: Weights, spec: TensorSpec, rows: slice, values: Tensor, columns: slice) -> None:
    """Quantise whole rows of a matrix. Write the given columns, and the scales, into `rows` of a buffer."""
    assert spec.quantised is not None, f"{spec.name} is not quantised"
    found, scales = quantise(values, spec.quantised)
    into[spec.name][rows].copy_(found[:, columns])
    into[name_scale(spec.name)][rows].copy_(scales)
