"""Quantised matrices, which are widened to the computation's type for each product."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from realrl.families.quantisation import SCALES
from realrl.families.tensors import Parameter, Quantisation
from realrl.layout.limits import CPU_WIDENED
from realrl.model.arithmetic.ops import Multiply
from realrl.model.gpu.path import on_gpu

_TYPES: Mapping[Quantisation, torch.dtype] = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


@dataclass(frozen=True, eq=False)
class QuantisedMatrix:
    """One rank's part of a quantised matrix. Its tensors are views of memory that may be freed and filled again."""

    values: Tensor
    """[M, K] int8 or float8_e4m3fn"""
    scales: Tensor
    """One scale per row. [M, 1] float32"""

    @classmethod
    def of(cls, weight: Tensor, scales: Tensor, quantisation: Quantisation) -> "QuantisedMatrix":
        """View stored bytes as a matrix. `weight` [M, K] has the bytes of the quantised numbers, `scales` [M, 4]
        the bytes of the float32 scales."""
        return cls(weight.view(_TYPES[quantisation]), scales.view(torch.float32))

    def widen(self, dtype: torch.dtype) -> Tensor:
        """Compute the matrix in type `dtype`: its numbers times the float32 scales, rounded once. -> [M, K]

        A CPU computes some rows at a time, so that they stay in its caches.
        """
        rows, columns = self.values.shape
        wide = torch.empty(rows, columns, dtype=dtype, device=self.values.device)
        step = max(1, rows if on_gpu(wide) else CPU_WIDENED // max(1, columns))
        for first in range(0, rows, step):
            part = slice(first, first + step)
            # The copy is exact, because bfloat16 and float32 can represent all values of int8 and fp8.
            wide[part].copy_(self.values[part]).mul_(self.scales[part])
        return wide


def find_matrices(
    layers: Iterable[tuple[int, nn.Module]],
    parameter: Callable[[int, Parameter], Tensor | None],
    quantisation: Quantisation | None,
) -> dict[int, QuantisedMatrix]:
    """Find the quantised matrices of layers, given as (number, layer) pairs. The result is keyed by the `id` of the
    tensor with a matrix's bytes.

    `parameter(number, name)` returns the bytes of a layer's scales. If `quantisation` is None, the result is empty.
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
    """Widen a matrix, or a stack of matrices, if it is quantised."""
    matrix = matrices.get(id(weight))
    return weight if matrix is None else matrix.widen(dtype)


def multiply_widened(multiply: Multiply, matrices: Mapping[int, QuantisedMatrix]) -> Multiply:
    """Make a function that also multiplies by quantised matrices, keyed by the `id` of the tensor with their
    bytes."""
    if not matrices:
        return multiply

    def widened(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return multiply(x, widen_if_quantised(weight, matrices, x.dtype), bias)

    return widened
