"""Files that a model's tensors are saved in, and portions in which they come to the process that writes them."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from realrl.checkpoint.stored import Weights, group_by_file_tensor, group_by_number, join_tensors
from realrl.families.tensors import TensorSpec
from realrl.layout.local_tensors import LocalTensor
from realrl.layout.region import Region

PORTION_BYTES = 8 << 20
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

    A portion has at most `PORTION_BYTES`, or the least that becomes rows of a file's tensor: a row, a head of each
    of queries, keys and values where these take turns, or all of a matrix whose rows are the file's columns.
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
    """Make one portion of tensors."""
    return [_take_rows(spec, 0, spec.shape[0]) for spec in tensors]


def join_portions(portions: Iterator[tuple[Portion, Weights]]) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors of files by name, in order, or rows of them, one part after the other."""
    for portion, weights in portions:
        first = {part.spec.name: part.region.offset[0] for part in portion}
        for group in group_by_file_tensor([part.stored for part in portion]):
            yield from join_tensors(group, {spec.name: weights[spec.name] for spec in group}, first).items()
        del weights  # before the next ones take memory


def _count_bytes(tensors: Sequence[TensorSpec], dtype: torch.dtype) -> int:
    return sum(tensor.numel for tensor in tensors) * dtype.itemsize


def _divide(matrix: Sequence[TensorSpec], dtype: torch.dtype) -> Iterator[Portion]:
    """Divide the parts of a matrix of a file into portions that become rows of it, one after the other."""
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
    """Find how many rows have to be saved together."""
    where = spec.stored
    return 1 if where is None or (where.order is None and where.period == where.block) else where.block


def _take_rows(spec: TensorSpec, first: int, last: int) -> LocalTensor:
    size = (last - first, *spec.shape[1:])
    return LocalTensor(spec, Region(spec.name, (first, *(0 for _ in size[1:])), size), size)
