"""Matrices that a quantised model stores as bytes, and tensors with the scales of these matrices.

This module does not import torch.
"""

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
"""Matrix that a quantised model stores as bytes -> parameter with the scales of its rows."""
SCALE_BYTES = 4
"""Bytes of one scale, which is a float32 number."""
LARGEST: dict[Quantisation, int] = {"int8": 127, "fp8": 448}
"""Value that the largest number of a row is stored as. For fp8, it is the largest finite float8_e4m3fn."""


def name_scale(matrix: str) -> str:
    return f"{matrix}_scale"


def is_scale(spec: TensorSpec) -> bool:
    """Return whether a tensor holds scales. Files have no scales, because reading a model computes them."""
    return spec.init is Init.SCALE


def quantise_tensors(tensors: Sequence[TensorSpec], quantisation: Quantisation) -> tuple[TensorSpec, ...]:
    """Mark the matrices of layers as bytes, and put the scales of their rows before all other tensors.

    A scale belongs to a whole row, even on a rank that holds only some of the columns. Scales are stored as bytes,
    so that they share one buffer with the matrices. Scales come first in this buffer, where their four-byte numbers
    are aligned.
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
