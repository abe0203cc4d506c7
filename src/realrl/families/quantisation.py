"""Quantised matrices: which they are, and the tensors of scales that they add to a model's. No torch."""

from collections.abc import Sequence
from dataclasses import replace

from realrl.families.tensors import Init, Parameter, Quantisation, TensorSpec

SCALES: dict[Parameter, Parameter] = {
    "qkv": "qkv_scale",
    "out": "out_scale",
    "gate_up": "gate_up_scale",
    "down": "down_scale",
    "experts_gate_up": "experts_gate_up_scale",
    "experts_down": "experts_down_scale",
}
"""Matrices that a quantised model stores as bytes -> the scales of their rows."""
SCALE_BYTES = 4
"""Bytes of a scale, a float32 number."""
LARGEST: dict[Quantisation, int] = {"int8": 127, "fp8": 448}
"""What the largest number of a row is stored as; that of float8_e4m3fn is its largest finite number."""


def name_scale(matrix: str) -> str:
    """Name the tensor of scales of a matrix."""
    return f"{matrix}_scale"


def is_scale(spec: TensorSpec) -> bool:
    """Tell whether a tensor is scales of a matrix, which no file has."""
    return spec.init is Init.SCALE


def quantise_tensors(tensors: Sequence[TensorSpec], quantisation: Quantisation) -> tuple[TensorSpec, ...]:
    """Store the matrices of layers as bytes, and put the scales of their rows before all other tensors.

    A row's scale is that of the whole row, also on a rank that holds some of its columns. Scales are bytes, too, so
    that they are in one buffer with the matrices; there they come first, where numbers of four bytes are aligned.
    """
    scales, found = [], []
    for spec in tensors:
        if spec.parameter not in SCALES:
            found.append(spec)
            continue
        found.append(replace(spec, quantised=quantisation))
        by_rows = spec.partition is not None and spec.partition.dim == 0
        scales.append(
            TensorSpec(
                name=name_scale(spec.name),
                shape=(spec.shape[0], SCALE_BYTES),
                parameter=SCALES[spec.parameter],
                place=spec.place,
                partition=spec.partition if by_rows else None,
                init=Init.SCALE,
                decay=False,
                quantised=quantisation,
            )
        )
    return (*scales, *found)
