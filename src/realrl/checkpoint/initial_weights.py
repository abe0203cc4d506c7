"""Weights that a model begins with where no directory holds any."""

import hashlib
import math
from collections.abc import Mapping, Sequence

import torch

from realrl.checkpoint.quantisation import write_quantised
from realrl.checkpoint.stored import Weights
from realrl.families.shape import ModelShape
from realrl.families.tensors import Init, TensorSpec
from realrl.layout.region import Region


def initialise(
    buffer: Weights,
    tensors: Sequence[TensorSpec],
    shape: ModelShape,
    seed: int,
    regions: Mapping[str, Region] | None = None,
) -> None:
    """Fill every tensor with its initial values (`TensorSpec.init`).

    `tensors` are global. `buffer` holds them whole or, with `regions`, these regions of them from the first
    row on.

    Magnitudes of DoRA are left alone: they follow from other tensors (`Transformer.initialise_magnitudes`). Scales
    are written with the matrices that are quantised.
    Matrices that write to the residual stream are scaled by 1 / sqrt(2 * layers) (Radford et al. 2019,
    section 2.3). Each tensor depends on the seed and its own name only, so not on layout, order or device.
    """
    for tensor in tensors:
        target = buffer[tensor.name]
        if tensor.init in (Init.MAGNITUDE, Init.SCALE):
            continue
        if tensor.init in (Init.ONES, Init.ZEROS):
            target.fill_(float(tensor.init is Init.ONES))
            continue
        digest = hashlib.sha256(f"{seed}/{tensor.name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))
        std = shape.init_std
        if tensor.init is Init.RESIDUAL:
            std /= math.sqrt(2 * shape.layers)
        values = torch.empty(tensor.shape)
        if tensor.init is Init.ADAPTER:
            bound = 1 / math.sqrt(tensor.shape[1])
            values.uniform_(-bound, bound, generator=generator)
        else:
            values.normal_(0.0, std, generator=generator)
        rows, *columns = (
            (slice(None),) * len(tensor.shape) if regions is None else regions[tensor.name].slices
        )
        values = values[rows]
        if tensor.quantised is not None:
            write_quantised(buffer, tensor, slice(0, len(values)), values, columns[0])
        else:
            target[: len(values)].copy_(values[:, *columns])
