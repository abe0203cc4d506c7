"""Memory of packed weights (`model.matrices`) on one TP rank, with which decode steps on a CPU may multiply.

Exact training and inference pack each matrix for its product and free the copy afterwards. Quantised matrices are
widened for each product, and have no packed copy. The CPU that runs a generate call decides whether packing pays
off, so these bytes are an upper bound.
"""

from collections.abc import Callable, Sequence

import numpy as np

from realrl.layout.limits import LANES
from realrl.plan.placement import ELEMENT_BYTES, Dtype
from realrl.planner.workload.shard_sizes import LocalSizes
from realrl.program.arrays import Bools, Ints


def packed_weight_bytes(sizes: LocalSizes, dtype: Dtype, *, layers: Sequence[Ints], head: Bools) -> Ints:
    """Compute the bytes of a packed copy of the matrices of layers and, if `head` is true, of the head. `layers`:
    the number of layers of each kind."""
    found: Ints = head * _add_rows(sizes.padded_vocab) * sizes.shape.hidden_size
    for kind, count in zip(sizes.kinds, layers, strict=True):
        own = kind.sizes
        matrices = (
            () if sizes.shape.quantised else own.matmul_shapes + own.experts // own.ep * own.expert_shapes
        )
        found = found + count * sum(_add_rows(rows) * columns for rows, columns in matrices)
    return _element_bytes(dtype) * found


def packing_bytes(sizes: LocalSizes, dtype: Dtype, *, head: Bools) -> Ints:
    """Compute the most temporary bytes while a matrix is packed, for a rounded copy and a copy with padding
    rows."""
    return _find_most(sizes, dtype, head, lambda rows, columns: _count_copied(rows, columns, dtype))


def packed_matrix_bytes(sizes: LocalSizes, dtype: Dtype, *, head: Bools) -> Ints:
    """Compute the most bytes held while one matrix is packed for a product, as exact forward passes do."""

    def count(rows: int, columns: int) -> int:
        return _add_rows(rows) * columns + _count_copied(rows, columns, dtype)

    return _find_most(sizes, dtype, head, count)


def widened_matrix_bytes(sizes: LocalSizes, dtype: Dtype) -> int:
    """Compute the bytes of the largest quantised matrix after widening. 0 if the model is not quantised."""
    widened = (rows * columns for kind in sizes.kinds for rows, columns in kind.sizes.widened_shapes)
    return ELEMENT_BYTES[dtype] * max(widened, default=0)


def _count_copied(rows: int, columns: int, dtype: Dtype) -> int:
    """Count the temporary elements while a matrix is packed, in addition to the packed copy."""
    return (dtype == "mixed") * rows * columns + (_add_rows(rows) != rows) * _add_rows(rows) * columns


def _find_most(sizes: LocalSizes, dtype: Dtype, head: Bools, count: Callable[[int, int], int]) -> Ints:
    """Find the most bytes for any matrix of a layer and, if `head` is true, of the head. `count` returns the number
    of elements for the rows and columns of a matrix."""
    of_layer = max(
        count(*matrix)
        for kind in sizes.kinds
        for matrix in kind.sizes.matmul_shapes + kind.sizes.expert_shapes
    )
    of_head = count(sizes.padded_vocab, sizes.shape.hidden_size)
    return _element_bytes(dtype) * np.where(head, max(of_layer, of_head), of_layer)


def _add_rows(rows: int) -> int:
    """Round up the number of rows to whole vectors of the kernels."""
    return -(-rows // LANES) * LANES


def _element_bytes(dtype: Dtype) -> int:
    """Bytes of a packed element. `mixed` rounds the operands of products to bfloat16."""
    return 4 if dtype == "float32" else 2
