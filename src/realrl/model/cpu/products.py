"""Matrix products on a CPU by our own kernel: each element depends only on one row and one column.

Libraries choose the order of a sum by the number of rows and threads. They also reorder the weight at every
product, which costs about as much as a product of few rows. Here a weight is packed once. An element is a sum of
chains of fused multiply-adds, in an order that depends neither on its place nor on its neighbours.
"""

from dataclasses import dataclass
from typing import Any

import numba
import torch
import torch.nn.functional as F
from torch import Tensor

from realrl.layout.limits import LANES
from realrl.model.cpu.rows import Work, bfloat16_pointer, claim, float_pointer, number, row_kernel, row_stride
from realrl.model.cpu.vectors import add_rows_by_panel, multiply_rows_by_panel

_BLOCK_ROWS = 192
"""Rows of x in a unit of work. Consecutive units multiply the same rows by different panels, so the rows should fit
in a cache."""
_CLAIMED_ROWS = 32
"""If there are few rows, a thread takes several panels at a time, so that rows times panels is about this
number."""
_BLOCK_DEPTH = 512
"""Number of products in a chain, before the chain is added to the other chains. A chain's rounding error grows with
its length."""


@dataclass(frozen=True, eq=False)
class Panels:
    """Packed weight [M, K] of products x @ weight.T. A panel interleaves 16 rows of the weight, so that the kernel
    reads memory in order."""

    weight: Tensor
    """[panels, K, LANES] float32 or bfloat16; rows beyond M are zero."""
    columns: int
    """M, the number of rows of the weight, which are the columns of the product."""

    @classmethod
    def of(cls, weight: Tensor) -> "Panels":
        """Pack a weight. [M, K]"""
        columns, depth = weight.shape
        padded = F.pad(weight, (0, 0, 0, -columns % LANES)) if columns % LANES else weight
        panels = padded.reshape(len(padded) // LANES, LANES, depth)
        return cls(panels.transpose(1, 2).contiguous(), columns)


@numba.njit(inline="always")
def _multiply(work: Work, x: Any, weight: Any) -> None:
    """Implement `multiply_float32` and `multiply_bfloat16`."""
    out, rows, depth, panels = (
        float_pointer(work, 2),
        int(number(work, 3)),
        int(number(work, 4)),
        int(number(work, 5)),
    )
    x_stride, out_stride = row_stride(work, 0), row_stride(work, 2)
    first, last = claim(work)
    while first < last:
        for item in range(first, last):
            panel = item % panels
            i = item // panels * _BLOCK_ROWS
            count = min(_BLOCK_ROWS, rows - i)
            at = panel * depth * LANES
            to = i * out_stride + panel * LANES
            for k in range(0, max(1, depth), _BLOCK_DEPTH):
                chain = min(_BLOCK_DEPTH, depth - k)
                at_x, at_weight = i * x_stride + k, at + k * LANES
                if k:
                    add_rows_by_panel(
                        count, x, at_x, x_stride, 1, weight, at_weight, LANES, chain, out, to, out_stride
                    )
                else:
                    multiply_rows_by_panel(
                        count, x, at_x, x_stride, 1, weight, at_weight, LANES, chain, out, to, out_stride
                    )
        first, last = claim(work)


@row_kernel(outputs=1, strict=True)
def multiply_float32(work: Work) -> None:
    """Multiply x [N, K] float32 with panels [panels * K * LANES] -> out [N, panels * LANES].

    Arguments: x, panels, out, N, K, number of panels. A unit of work is one panel and `_BLOCK_ROWS` rows of x.
    """
    _multiply(work, float_pointer(work, 0), float_pointer(work, 1))


@row_kernel(outputs=1, strict=True)
def multiply_bfloat16(work: Work) -> None:
    """`multiply_float32` with panels in bfloat16; x and out are float32."""
    _multiply(work, float_pointer(work, 0), bfloat16_pointer(work, 1))


def multiply_rows(x: Tensor, panels: Panels) -> Tensor:
    """Compute x @ weight.T in float32. x: [N, K], of any type -> [N, M] float32"""
    rows, depth = x.shape
    count = len(panels.weight)
    out = torch.empty(rows, count * LANES)
    x = x.float()
    if x.stride(1) != 1:
        x = x.contiguous()
    kernel, weight = multiply_float32, panels.weight.view(-1)
    if weight.dtype == torch.bfloat16:
        kernel, weight = multiply_bfloat16, weight.view(torch.int16)
    if out.numel():
        pieces = count * -(-rows // _BLOCK_ROWS)
        kernel(pieces, x, weight, out, rows, depth, count, claim=max(1, _CLAIMED_ROWS // rows))
    return out if panels.columns == count * LANES else out[:, : panels.columns].contiguous()
