"""Memory of the packed weights that decode steps on a CPU may multiply by (`model.matrices`), on one TP rank.

Exact training and inference pack each matrix for its product, and free it after it. Quantised matrices are widened
likewise, and have no packed copy. Whether a generate call packs weights is a choice of the machine that it runs on:
what is counted is an upper bound.
"""

import numpy as np

from realrl.layout.limits import LANES
from realrl.plan.placement import ELEMENT_BYTES, Dtype
from realrl.planner.workload.shard_sizes import LocalSizes
from realrl.program.arrays import Bools, Ints


def packed_weight_bytes(sizes: LocalSizes, dtype: Dtype, *, layers: Ints, head: Bools) -> Ints:
    """Compute the bytes of a packed copy of the matrices of `layers` and, if `head`, of the head's."""
    matrices = () if sizes.shape.quantised else sizes.matmul_shapes + sizes.experts * sizes.expert_shapes
    of_layer, of_head = (
        sum(_add_rows(rows) * columns for rows, columns in shapes)
        for shapes in (matrices, _head_shape(sizes))
    )
    return _element_bytes(dtype) * (layers * of_layer + head * of_head)


def packing_bytes(sizes: LocalSizes, dtype: Dtype, *, head: Bools) -> Ints:
    """Compute the bytes held beside it while a matrix is packed: what is rounded, and what has rows added."""
    with_head, without = (max(_copies(s, dtype) for s in _shapes(sizes, of)) for of in (True, False))
    return _element_bytes(dtype) * np.where(head, with_head, without)


def packed_matrix_bytes(sizes: LocalSizes, dtype: Dtype, *, head: Bools) -> Ints:
    """Compute the most bytes held while one matrix is packed for a product, as exact forward passes do."""
    with_head, without = (
        max(
            _add_rows(rows) * columns + _copies((rows, columns), dtype)
            for rows, columns in _shapes(sizes, of)
        )
        for of in (True, False)
    )
    return _element_bytes(dtype) * np.where(head, with_head, without)


def widened_matrix_bytes(sizes: LocalSizes, dtype: Dtype) -> int:
    """Compute the most bytes held while a quantised matrix is widened for a product; 0 where there is none."""
    widened = (rows * columns for rows, columns in sizes.widened_shapes)
    return ELEMENT_BYTES[dtype] * max(widened, default=0)


def _copies(shape: tuple[int, int], dtype: Dtype) -> int:
    """Elements held beside a matrix while it is packed."""
    rows, columns = shape
    return (dtype == "mixed") * rows * columns + (_add_rows(rows) != rows) * _add_rows(rows) * columns


def _shapes(sizes: LocalSizes, head: bool) -> tuple[tuple[int, int], ...]:
    return sizes.matmul_shapes + sizes.expert_shapes + (_head_shape(sizes) if head else ())


def _head_shape(sizes: LocalSizes) -> tuple[tuple[int, int]]:
    return ((sizes.padded_vocab, sizes.shape.hidden_size),)


def _add_rows(rows: int) -> int:
    """Round up to whole vectors."""
    return -(-rows // LANES) * LANES


def _element_bytes(dtype: Dtype) -> int:
    """Bytes of a packed element: `mixed` products round operands to bfloat16."""
    return 4 if dtype == "float32" else 2
