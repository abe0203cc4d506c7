"""Initial weights of a model that starts from scratch."""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from realrl.families.shape import ModelShape
from realrl.families.tensors import Init, TensorSpec
from realrl.huggingface.tensor_conversion import Weights, write_quantised
from realrl.layout.region import Region


def initialise(
    buffer: Weights,
    tensors: Sequence[TensorSpec],
    shape: ModelShape,
    seed: int,
    regions: Mapping[str, Region] | None = None,
) -> None:
    """Fill every tensor with its initial values (`TensorSpec.init`).

    `tensors` describe whole tensors. With `regions`, `buffer` holds only these regions of the tensors. The values
    of a region begin in the first row of its tensor in `buffer`.

    DoRA's magnitudes are skipped, because `Transformer.initialise_magnitudes` computes them from other tensors.
    Scales are written together with their quantised matrices. Matrices that write to the residual stream are scaled
    by 1 / sqrt(2 * layers) (Radford et al. 2019, section 2.3). The values of a tensor depend only on the seed and
    its name, so layout, order and device do not matter. At most `_DRAWN_ELEMENTS` values, or one row, are in memory
    at a time.
    """
    for tensor in tensors:
        target = buffer[tensor.name]
        if tensor.init in (Init.MAGNITUDE, Init.SCALE):
            continue
        if tensor.init in (Init.ONES, Init.ZEROS):
            filled = len(target) if regions is None else regions[tensor.name].size[0]
            target[:filled].fill_(float(tensor.init is Init.ONES))
            continue
        region = Region(tensor.name, (0,) * len(tensor.shape), tensor.shape)
        if regions is not None:
            region = regions[tensor.name]
        columns = region.slices[1:]
        for rows, values in _draw(tensor, region, shape, seed):
            if tensor.quantised is None:
                target[rows].copy_(values[:, *columns])
            else:
                write_quantised(buffer, tensor, rows, values, *columns)


_DRAWN_ELEMENTS = 2**24
"""Maximum number of values drawn at a time. Each block of rows has its own seed, so a rank draws only the blocks
that it needs."""


def _draw(tensor: TensorSpec, region: Region, shape: ModelShape, seed: int) -> Iterator[tuple[slice, Tensor]]:
    """Draw a region of a tensor.

    Yields slices of the region's rows, and the values of all columns in these rows.
    """
    rows = region.slices[0]
    step = max(1, _DRAWN_ELEMENTS // math.prod(tensor.shape[1:]))
    for number in range(rows.start // step, -(-rows.stop // step)):
        first = number * step
        name = f"{seed}/{tensor.name}" + (f"/{number}" if number else "")
        digest = hashlib.sha256(name.encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))
        values = torch.empty(min(step, tensor.shape[0] - first), *tensor.shape[1:])
        if tensor.init is Init.ADAPTER:
            bound = 1 / math.sqrt(tensor.shape[1])
            values.uniform_(-bound, bound, generator=generator)
        else:
            std = shape.init_std / (math.sqrt(2 * shape.layers) if tensor.init is Init.RESIDUAL else 1)
            values.normal_(0.0, std, generator=generator)
        start, stop = max(rows.start, first), min(rows.stop, first + len(values))
        yield slice(start - rows.start, stop - rows.start), values[start - first : stop - first]
