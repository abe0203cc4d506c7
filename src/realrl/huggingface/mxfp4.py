"""Matrices in the format MXFP4, in which gpt-oss is published: reading them as bfloat16 numbers.

32 consecutive numbers of a row form a block. A block has a scale, a power of two that is stored as one byte. Each
number is the scale times a 4-bit float (OCP Microscaling Formats, MX v1.0, sections 5.3 and 6.3). A byte holds two
numbers, the first of them in the lower half. Every such number is also a bfloat16 number.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

BLOCK = 32
"""Numbers in a block."""
BLOCKS, SCALES = "_blocks", "_scales"
"""Endings of the names of the two tensors that hold a stack of packed matrices."""
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the 4-bit floats whose sign bit, the highest of the four, is 0."""


@cache
def _list_pairs() -> Tensor:
    """List the two numbers of each byte, as bfloat16 numbers that share the bits of an int32. [256] int32"""
    numbers = torch.tensor([*_MAGNITUDES, *(-value for value in _MAGNITUDES)])
    bytes_ = torch.arange(256)
    return torch.stack((numbers[bytes_ & 15], numbers[bytes_ >> 4]), 1).bfloat16().view(torch.int32)[:, 0]


def unpack(blocks: Tensor, scales: Tensor) -> Tensor:
    """Unpack rows of blocks. A scale of 255 makes the numbers of its block NaN.

    blocks: [..., G, 16] uint8, scales: [..., G] uint8 -> [..., G * 32] bfloat16
    """
    # One look-up finds two numbers.
    pairs = _list_pairs().index_select(0, blocks.flatten().int())
    numbers = pairs.view(torch.bfloat16).view(*scales.shape, BLOCK)
    return numbers.mul_(scales.view(torch.float8_e8m0fnu).bfloat16()[..., None]).flatten(-2)


class PackedStack:
    """A stack of packed matrices, which is indexed like a stack of unpacked and transposed matrices.

    Only the blocks that the index needs are read and unpacked.
    """

    def __init__(self, blocks: Any, scales: Any) -> None:
        """`blocks` [E, M, G, 16] and `scales` [E, M, G] are tensors, or slice objects of safetensors."""
        self._blocks, self._scales = blocks, scales

    def __getitem__(self, index: tuple[int, slice, slice]) -> Tensor:
        """Read columns of rows of a matrix. The index is (matrix, columns, rows). -> [columns, rows] bfloat16"""
        number, columns, rows = index
        first = columns.start // BLOCK
        groups = slice(first, -(-columns.stop // BLOCK))
        values = unpack(self._blocks[number, rows, groups], self._scales[number, rows, groups])
        return values[:, columns.start - first * BLOCK : columns.stop - first * BLOCK].T
