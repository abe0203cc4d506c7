"""Quantisation of matrices as they are read: numbers of one byte, and a scale for each row."""

import torch
from torch import Tensor

from realrl.checkpoint.stored import Weights
from realrl.families.quantisation import LARGEST, name_scale
from realrl.families.tensors import Quantisation, TensorSpec


def quantise(values: Tensor, quantisation: Quantisation) -> tuple[Tensor, Tensor]:
    """Quantise whole rows: w is about q * s, with s = max|row| / (largest number of the type).

    values: [N, K] -> q as bytes [N, K] uint8, and s as bytes [N, 4] uint8. A row of zeros has the scale 1.
    """
    wide = values.float()
    scales = wide.abs().amax(1, keepdim=True) / LARGEST[quantisation]
    scales = torch.where(scales > 0, scales, 1.0)
    # The division rounds, too: the largest number must not become one that the type does not have.
    wide = (wide / scales).clamp_(-LARGEST[quantisation], LARGEST[quantisation])
    found = wide.round_().to(torch.int8) if quantisation == "int8" else wide.to(torch.float8_e4m3fn)
    return found.view(torch.uint8), scales.view(torch.uint8)


def write_quantised(into: Weights, spec: TensorSpec, rows: slice, values: Tensor, columns: slice) -> None:
    """Quantise whole rows of a matrix, and write some of their columns, and their scales, into a buffer.

    `rows` are those of the buffer's tensors that get them.
    """
    assert spec.quantised is not None, f"{spec.name} is not quantised"
    found, scales = quantise(values, spec.quantised)
    into[spec.name][rows].copy_(found[:, columns])
    into[name_scale(spec.name)][rows].copy_(scales)
