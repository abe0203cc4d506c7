"""Tensors with a row per token, read from the files of a model with fewer tokens."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from realrl.checkpoint.stored import read_parts
from realrl.families.tensors import TensorSpec
from realrl.layout.region import Region


def read_grown(
    stored: Any, spec: TensorSpec, region: Region | None, rows: int
) -> Iterator[tuple[tuple[slice, ...], Tensor]]:
    """Read a region of a tensor as `read_parts` does, though the file has only its first `rows` rows.

    Each new row is the mean of the file's rows, as with `resize_token_embeddings` of transformers, but without its
    noise: the values depend on nothing but the file, so every layout reads the same ones.
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
    """Take the part of a region that a file with `rows` rows has; it may be empty."""
    whole = region or _whole(spec)
    count = max(0, min(whole.size[0], rows - whole.offset[0]))
    return Region(spec.name, whole.offset, (count, *whole.size[1:]))


def _whole(spec: TensorSpec) -> Region:
    return Region(spec.name, (0,) * len(spec.shape), spec.shape)
