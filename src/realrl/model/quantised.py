"""Quantised matrices, which are widened to the type of the computation for each product."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from realrl.families.quantisation import SCALES
from realrl.families.tensors import Parameter, Quantisation
from realrl.layout.limits import CPU_WIDENED
from realrl.model.arithmetic.matrices import Multiply
from realrl.model.gpu.path import on_gpu

_TYPES: Mapping[Quantisation, torch.dtype] = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


@dataclass(frozen=True, eq=False)
class QuantisedMatrix:
    """Matrix as one rank holds it; all are views of memory that may be released and filled again."""

    values: Tensor
    """[M, K] int8 or float8_e4m3fn"""
    scales: Tensor
    """Scales of its rows. [M, 1] float32"""

    @classmethod
    def of(cls, weight: Tensor, scales: Tensor, quantisation: Quantisation) -> "QuantisedMatrix":
        """Make it of the bytes of its numbers [M, K] and of its scales [M, 4]."""
        return cls(weight.view(_TYPES[quantisation]), scales.view(torch.float32))

    def widen(self, dtype: torch.dtype) -> Tensor:
        """Compute the matrix in a type: products with scales in float32, rounded once. -> [M, K]

        On a CPU some rows at a time, which stay in its caches.
        """
        rows, columns = self.values.shape
        wide = torch.empty(rows, columns, dtype=dtype, device=self.values.device)
        step = max(1, rows if on_gpu(wide) else CPU_WIDENED // max(1, columns))
        for first in range(0, rows, step):
            part = slice(first, first + step)
            # Every type that is computed in has all of their digits.
            wide[part].copy_(self.values[part]).mul_(self.scales[part])
        return wide


def find_matrices(
    layers: Iterable[tuple[int, nn.Module]],
    parameter: Callable[[int, Parameter], Tensor | None],
    quantisation: Quantisation | None,
) -> dict[int, QuantisedMatrix]:
    """Find the quantised matrices of layers, which are given with their numbers, by the `id` of their bytes.

    `parameter` gives the bytes of scales. Without a `quantisation`, there are none.
    """
    if quantisation is None:
        return {}
    found = {}
    for number, layer in layers:
        for matrix, scale in SCALES.items():
            weight, scales = getattr(layer, matrix, None), parameter(number, scale)
            if weight is not None and scales is not None:
                found[id(weight)] = QuantisedMatrix.of(weight, scales, quantisation)
    return found


def widen_if_quantised(weight: Tensor, matrices: Mapping[int, QuantisedMatrix], dtype: torch.dtype) -> Tensor:
    """Widen a matrix, or a stack of them, that is quantised; others stay as they are."""
    matrix = matrices.get(id(weight))
    return weight if matrix is None else matrix.widen(dtype)


def multiply_widened(multiply: Multiply, matrices: Mapping[int, QuantisedMatrix]) -> Multiply:
    """Make a function that multiplies by quantised matrices, too; `matrices` are by the `id` of their bytes."""
    if not matrices:
        return multiply

    def widened(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return multiply(x, widen_if_quantised(weight, matrices, x.dtype), bias)

    return widened
