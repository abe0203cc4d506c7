"""Shards of a saved model: the tensors in each file, the portions in which they arrive, and the writing of files.

A file in the safetensors format (github.com/huggingface/safetensors) begins with 8 bytes that hold the length of
its header. The header is a JSON object with the place of each tensor. The bytes of the tensors follow the header.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from realrl.config.files import write_all
from realrl.engine.finite import NotFiniteError, all_finite
from realrl.engine.offload import view_bytes
from realrl.families.tensors import TensorSpec
from realrl.huggingface.tensor_conversion import Weights, group_by_file_tensor, group_by_number, join_tensors
from realrl.layout.local_tensors import LocalTensor
from realrl.layout.region import Region

PORTION_BYTES = 8 << 20
"""Maximum bytes of weights that the writing process holds at a time, unless one row needs more."""

Portion = Sequence[LocalTensor]
"""Tensors, or rows of one tensor, that are in memory at the same time while a model is saved."""


def list_shards(tensors: Sequence[TensorSpec], dtype: torch.dtype, limit: float) -> list[list[TensorSpec]]:
    """Group tensors by shard. A shard has at most `limit` bytes, unless a single tensor is larger."""
    shards: list[list[TensorSpec]] = [[]]
    used = 0
    for group in group_by_file_tensor(tensors):
        size = _count_bytes(group, dtype)
        if shards[-1] and used + size > limit:
            shards.append([])
            used = 0
        shards[-1] += group
        used += size
    return shards


def list_portions(tensors: Sequence[TensorSpec], dtype: torch.dtype) -> Sequence[Portion]:
    """Group tensors into portions, in the order in which they are saved.

    A portion has at most `PORTION_BYTES`, unless the smallest possible portion is larger. The smallest portion must
    fill whole rows of the file's tensor. Usually it is one row. If queries, keys and values alternate in the file,
    it is one head of each. If the file stores the matrix transposed, it is the whole matrix.
    """
    portions: list[list[LocalTensor]] = [[]]
    used = 0
    for group in (matrix for whole in group_by_file_tensor(tensors) for matrix in group_by_number(whole)):
        size = _count_bytes(group, dtype)
        if portions[-1] and used + size > PORTION_BYTES:
            portions.append([])
            used = 0
        if size > PORTION_BYTES:
            portions[-1:] = (list(part) for part in _divide(group, dtype))
        else:
            portions[-1] += (_take_rows(spec, 0, spec.shape[0]) for spec in group)
        used += size
    return portions


def take_whole(tensors: Sequence[TensorSpec]) -> Portion:
    """Make one portion of whole tensors."""
    return [_take_rows(spec, 0, spec.shape[0]) for spec in tensors]


def join_portions(portions: Iterator[tuple[Portion, Weights]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of files with their names, in order. A tensor may come in pieces of consecutive rows."""
    for portion, weights in portions:
        first = {part.spec.name: part.region.offset[0] for part in portion}
        for group in group_by_file_tensor([part.stored for part in portion]):
            yield from join_tensors(group, {spec.name: weights[spec.name] for spec in group}, first).items()
        del weights  # before the next portion takes memory


def _count_bytes(tensors: Sequence[TensorSpec], dtype: torch.dtype) -> int:
    """Bytes of tensors in memory, which are about those in a file."""
    return sum(tensor.numel for tensor in tensors) * dtype.itemsize


def _divide(matrix: Sequence[TensorSpec], dtype: torch.dtype) -> Iterator[Portion]:
    """Divide the tensors that make up one matrix of a file into portions. A portion fills consecutive rows."""
    if any(spec.stored is not None and spec.stored.transposed for spec in matrix):
        yield take_whole(matrix)
        return
    take_turns = any(spec.stored is not None and spec.stored.period > spec.stored.block for spec in matrix)
    in_order = sorted(matrix, key=lambda spec: 0 if spec.stored is None else spec.stored.start)
    for specs in [in_order] if take_turns else [[spec] for spec in in_order]:
        heights = [_find_block(spec) for spec in specs]
        blocks = specs[0].shape[0] // heights[0]
        step = max(1, PORTION_BYTES * blocks // _count_bytes(specs, dtype))
        for first in range(0, blocks, step):
            last = min(first + step, blocks)
            yield [_take_rows(spec, first * n, last * n) for spec, n in zip(specs, heights, strict=True)]


def _find_block(spec: TensorSpec) -> int:
    """Return how many rows must be saved together."""
    where = spec.stored
    return 1 if where is None or (where.order is None and where.period == where.block) else where.block


def _take_rows(spec: TensorSpec, first: int, last: int) -> LocalTensor:
    size = (last - first, *spec.shape[1:])
    return LocalTensor(spec, Region(spec.name, (first, *(0 for _ in size[1:])), size), size)


class FileTensor(NamedTuple):
    """A tensor of a file."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def describe_file(tensors: Sequence[TensorSpec], dtype: torch.dtype) -> dict[str, FileTensor]:
    """Describe the file tensors that hold some tensors of a model of this dtype, by name. Exact numbers are float32
    in any model."""
    return {
        spec.file_name: FileTensor(
            spec.file_shape, torch.float32 if spec.stored is not None and spec.stored.exact else dtype
        )
        for spec in tensors
    }


DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16"}
"""Names of dtypes in the header of a file."""
_ALIGNMENT = 8
"""The first tensor starts at a multiple of this number of bytes."""


def write_file(
    path: Path,
    described: Mapping[str, "FileTensor"],
    tensors: Iterator[tuple[str, Tensor]],
) -> None:
    """Write a file of tensors, and flush it to the disk. Tensors arrive one after the other, whole or in rows.

    `described` lists the file's tensors in the order in which they arrive. Tensors of later files stay in the
    iterator. Raises NotFiniteError if a value is not finite, and OSError.
    """
    with path.open("wb", buffering=0) as file:
        write_all(file, memoryview(_make_header(described)))
        for name, (shape, dtype) in described.items():
            left = prod(shape)
            while left:
                given, values = next(tensors)
                left -= values.numel()
                assert given == name and left >= 0, f"{given} comes where {name} should"
                part = values.detach().to("cpu", dtype).contiguous()
                if not all_finite(part):
                    raise NotFiniteError(
                        f"not saved: {name} has values that are not finite (NaN or infinity)"
                    )
                write_all(file, view_bytes(part))
                del values, part  # before the next part takes memory
        os.fsync(file.fileno())


def _make_header(described: Mapping[str, "FileTensor"]) -> bytes:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, (shape, dtype) in described.items():
        end = start + prod(shape) * dtype.itemsize
        header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": shape, "data_offsets": (start, end)}
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
