"""Products of rows with a panel, for compiled kernels: a panel is 16 columns side by side, [depth, 16].

A number is one chain of fused multiplications and additions in the order of the depth, whichever rows are
multiplied together, so that it is a function of its row and its column alone.
"""

from typing import Any

import numba
from llvmlite import binding

from realrl.model.cpu.vectors import make_panel_product

REGISTER_ROWS = 12 if binding.get_host_cpu_features().get("avx512f") else 6
"""Rows that are multiplied with a panel at a time: a sum is one register of AVX-512, or two of the 16 of AVX2."""


def _make_rows_product(*, adds: bool) -> Any:
    multiply_most = make_panel_product(REGISTER_ROWS, adds=adds)
    multiply_two = make_panel_product(2, adds=adds)
    multiply_one = make_panel_product(1, adds=adds)

    @numba.njit(inline="always")
    def multiply(
        rows: int,
        x: Any,
        at_x: int,
        stride: int,
        step: int,
        panel: Any,
        at_panel: int,
        panel_step: int,
        depth: int,
        out: Any,
        at_out: int,
        out_stride: int,
    ) -> None:
        i = 0
        while rows - i >= REGISTER_ROWS:
            a, to = at_x + i * stride, at_out + i * out_stride
            multiply_most(x, a, stride, step, panel, at_panel, panel_step, depth, out, to, out_stride)
            i += REGISTER_ROWS
        while rows - i >= 2:
            a, to = at_x + i * stride, at_out + i * out_stride
            multiply_two(x, a, stride, step, panel, at_panel, panel_step, depth, out, to, out_stride)
            i += 2
        if i < rows:
            a, to = at_x + i * stride, at_out + i * out_stride
            multiply_one(x, a, stride, step, panel, at_panel, panel_step, depth, out, to, out_stride)

    return multiply


multiply_rows_by_panel = _make_rows_product(adds=False)
"""Multiply any number of rows with a panel: (rows, x, at_x, stride, step, panel, at_panel, panel_step, depth, out,
at_out, out_stride), as `vectors.make_panel_product` says; number k of row r is x[at_x + r * stride + k * step]."""
add_rows_by_panel = _make_rows_product(adds=True)
"""Add that product to `out`."""
