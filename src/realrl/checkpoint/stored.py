"""Tensors of a model in the tensors of files: the same ones, or some rows of larger ones."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from realrl.families.tensors import TensorSpec
from realrl.layout.region import Region


def read_region(stored: Any, spec: TensorSpec, region: Region | None = None) -> Tensor:
    """Read a region of a tensor, or all of it, from the tensor of a file that holds it.

    `stored` gives parts of that when indexed, as a tensor does, or a slice of a safetensors file.
    """
    if region is None:
        region = Region(spec.name, (0,) * len(spec.shape), spec.shape)
    if not region.numel:
        return torch.empty(region.size)
    where = spec.stored
    if where is None:
        return stored[region.slices]
    rows, *columns = region.slices
    numbers = where.rows(rows.start, rows.stop)
    first, last = min(numbers), max(numbers) + 1
    part = (
        stored[(*columns, slice(first, last))].T
        if where.transposed
        else stored[(slice(first, last), *columns)]
    )
    if numbers == list(range(first, last)):
        return part
    return part[torch.tensor(numbers) - first]


def join_tensors(specs: Sequence[TensorSpec], values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Put tensors of a model together to those of files, by their names there. `values` are whole, by own names."""
    files: dict[str, Tensor] = {}
    for spec in specs:
        value, where = values[spec.name].detach(), spec.stored
        if where is None:
            files[spec.name] = value
            continue
        if where.name not in files:
            files[where.name] = value.new_empty(where.shape)
        own = files[where.name].T if where.transposed else files[where.name]
        own[torch.tensor(where.rows(0, len(value)), device=value.device)] = value
    return files


def group_by_file_tensor(specs: Sequence[TensorSpec]) -> list[list[TensorSpec]]:
    """Group tensors of a model by the tensor of a file that they are, or are a part of, in order."""
    groups: dict[str, list[TensorSpec]] = {}
    for spec in specs:
        groups.setdefault(spec.file_name, []).append(spec)
    return list(groups.values())
