"""Files that a model's tensors are saved in, and portions in which they come to the process that writes them."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from realrl.checkpoint.stored import Weights, group_by_file_tensor, group_by_number, join_tensors
from realrl.families.tensors import TensorSpec
from realrl.layout.layout import LocalTensor
from realrl.layout.region import Region

PORTION_BYTES = 16 << 20
"""Maximum bytes of weights brought to one process at a time to be written, unless they become one larger tensor."""

Portion = Sequence[LocalTensor]
"""Tensors, or rows of one, that are in memory at a time while a model is saved."""


def list_files(tensors: Sequence[TensorSpec], dtype: torch.dtype, limit: float) -> list[list[TensorSpec]]:
    """Group tensors by the file that they are saved in; a file has at most `limit` bytes, or one tensor."""
    files: list[list[TensorSpec]] = [[]]
    used = 0
    for group in group_by_file_tensor(tensors):
        size = _count_bytes(group, dtype)
        if files[-1] and used + size > limit:
            files.append([])
            used = 0
        files[-1] += group
        used += size
    return files


def list_portions(tensors: Sequence[TensorSpec], dtype: torch.dtype) -> Sequence[Portion]:
    """Group tensors into portions, in the order in which they are saved.

    A portion has at most `PORTION_BYTES`, or the tensors that are joined to one of a file, or to one matrix of it.
    """
    portions: list[list[LocalTensor]] = [[]]
    used = 0
    for group in (matrix for whole in group_by_file_tensor(tensors) for matrix in group_by_number(whole)):
        size = _count_bytes(group, dtype)
        if portions[-1] and used + size > PORTION_BYTES:
            portions.append([])
            used = 0
        if size > PORTION_BYTES and len(group) == 1 and group[0].stored is None:
            portions[-1:] = ([part] for part in _divide(group[0], dtype))
        else:
            portions[-1] += (_take_rows(spec, 0, spec.shape[0]) for spec in group)
        used += size
    return portions


def take_whole(tensors: Sequence[TensorSpec]) -> Portion:
    """Make one portion of few and small tensors."""
    return [_take_rows(spec, 0, spec.shape[0]) for spec in tensors]


def join_portions(portions: Iterator[tuple[Portion, Weights]]) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors of files by name, in order, or rows of them, one part after the other."""
    for portion, weights in portions:
        for group in group_by_file_tensor([part.stored for part in portion]):
            yield from join_tensors(group, {spec.name: weights[spec.name] for spec in group}).items()
        del weights  # before the next ones take memory


def _count_bytes(tensors: Sequence[TensorSpec], dtype: torch.dtype) -> int:
    return sum(tensor.numel for tensor in tensors) * dtype.itemsize


def _divide(spec: TensorSpec, dtype: torch.dtype) -> Iterator[LocalTensor]:
    rows = spec.shape[0]
    step = max(1, PORTION_BYTES * rows // (spec.numel * dtype.itemsize))
    for first in range(0, rows, step):
        yield _take_rows(spec, first, min(first + step, rows))


def _take_rows(spec: TensorSpec, first: int, last: int) -> LocalTensor:
    size = (last - first, *spec.shape[1:])
    return LocalTensor(spec, Region(spec.name, (first, *(0 for _ in size[1:])), size), size)
