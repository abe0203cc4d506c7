"""Matrix products of which each number is a function of one row and one column alone, bit for bit, on a CPU.

Libraries choose the order of a sum by the number of rows and of threads. Here a number is a sum of 16 lanes, each a
chain of fused multiplications and additions, wherever in the matrix it is and whatever is computed beside it.
"""

from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from realrl.model.cpu import vectors
from realrl.model.cpu.rows import (
    Work,
    bfloat16_pointer,
    claim,
    float_pointer,
    number,
    row,
    row_kernel,
    row_stride,
)
from realrl.model.cpu.vectors import LANES, add_halves, load_number, load_vector, multiply_add

_BLOCK_ELEMENTS = 1 << 15
"""Elements of the rows of x that are multiplied with one weight row after another: they stay in a cache."""
_BLOCK_COLUMNS = 96
"""Rows of the weight in a piece of work: with few rows of x there are still pieces for every thread."""


@numba.njit(inline="always")
def _finish(total: Any, x: Any, at_x: int, w: Any, at_w: int, first: int, depth: int) -> np.float32:
    """Add up the lanes of a sum, and the products that fill no vector."""
    out = add_halves(total)
    for k in range(first, depth):
        out += x[at_x + k] * load_number(w, at_w + k)
    return out


@numba.njit(inline="always")
def _multiply(work: Work, x: Any, w: Any) -> None:
    """Compute what `multiply_float32` says, with weights of either type."""
    rows, columns = int(number(work, 3)), int(number(work, 4))
    depth, block_rows = int(number(work, 5)), int(number(work, 6))
    whole = depth // LANES * LANES
    x_stride, w_stride = row_stride(work, 0), row_stride(work, 1)
    column_blocks = (columns + _BLOCK_COLUMNS - 1) // _BLOCK_COLUMNS
    first, last = claim(work)
    while first < last:
        for item in range(first, last):
            row_begin = item // column_blocks * block_rows
            row_end = min(row_begin + block_rows, rows)
            column_begin = item % column_blocks * _BLOCK_COLUMNS
            column_end = min(column_begin + _BLOCK_COLUMNS, columns)
            # Two rows with three columns at a time: as many sums as there are registers for with AVX2. At the edges
            # some are computed twice, which gives the same numbers.
            for j in range(column_begin, column_end, 3):
                j1, j2 = min(j + 1, column_end - 1), min(j + 2, column_end - 1)
                w0, w1, w2 = j * w_stride, j1 * w_stride, j2 * w_stride
                for i in range(row_begin, row_end, 2):
                    i1 = min(i + 1, row_end - 1)
                    x0, x1 = i * x_stride, i1 * x_stride
                    s00, s01, s02 = vectors.zeros(), vectors.zeros(), vectors.zeros()
                    s10, s11, s12 = vectors.zeros(), vectors.zeros(), vectors.zeros()
                    for k in range(0, whole, LANES):
                        a0, a1 = load_vector(x, x0 + k), load_vector(x, x1 + k)
                        b = load_vector(w, w0 + k)
                        s00, s10 = multiply_add(a0, b, s00), multiply_add(a1, b, s10)
                        b = load_vector(w, w1 + k)
                        s01, s11 = multiply_add(a0, b, s01), multiply_add(a1, b, s11)
                        b = load_vector(w, w2 + k)
                        s02, s12 = multiply_add(a0, b, s02), multiply_add(a1, b, s12)
                    out = row(work, 2, i)
                    out[j] = _finish(s00, x, x0, w, w0, whole, depth)
                    out[j1] = _finish(s01, x, x0, w, w1, whole, depth)
                    out[j2] = _finish(s02, x, x0, w, w2, whole, depth)
                    out = row(work, 2, i1)
                    out[j] = _finish(s10, x, x1, w, w0, whole, depth)
                    out[j1] = _finish(s11, x, x1, w, w1, whole, depth)
                    out[j2] = _finish(s12, x, x1, w, w2, whole, depth)
        first, last = claim(work)


@row_kernel(outputs=1, strict=True)
def multiply_float32(work: Work) -> None:
    """Multiply x [N, K] float32 with weight [M, K] -> out [N, M]. Arguments: x, weight, out, N, M, K, and the rows
    of x in a piece of work; rows of work are pieces, those of the same rows of x one after the other."""
    _multiply(work, float_pointer(work, 0), float_pointer(work, 1))


@row_kernel(outputs=1, strict=True)
def multiply_bfloat16(work: Work) -> None:
    """Compute the same with a weight in bfloat16; x and out are float32."""
    _multiply(work, float_pointer(work, 0), bfloat16_pointer(work, 1))


def multiply_rows(x: Tensor, weight: Tensor) -> Tensor:
    """Compute x @ weight.T in float32. x: [N, K], weight: [M, K], float32 or bfloat16 -> [N, M] float32"""
    rows, depth = x.shape
    columns = len(weight)
    out = torch.empty(rows, columns)
    if not out.numel():
        return out
    x = x.float()
    x, weight = (of if of.stride(1) == 1 or depth < 2 else of.contiguous() for of in (x, weight))
    kernel = multiply_float32
    if weight.dtype == torch.bfloat16:
        kernel, weight = multiply_bfloat16, weight.view(torch.int16)
    block_rows = max(2, _BLOCK_ELEMENTS // max(1, depth) // 2 * 2)
    pieces = -(-rows // block_rows) * -(-columns // _BLOCK_COLUMNS)
    kernel(pieces, x, weight, out, rows, columns, depth, block_rows, claim=1)
    return out
