"""Safetensors files, written tensor by tensor.

The format (github.com/huggingface/safetensors): the length of a header in 8 bytes, a JSON object that says where
each tensor lies, and their bytes, one after the other.
"""

import json
import os
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from realrl.config.files import write_all
from realrl.engine.finite import NotFiniteError, all_finite
from realrl.engine.offload import view_bytes

DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16"}
"""Types of saved tensors, and their names in a header."""
_ALIGNMENT = 8
"""Bytes of which the first tensor's place is a multiple."""


def write_file(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    tensors: Iterator[tuple[str, Tensor]],
) -> None:
    """Write a file of tensors that come one after the other, whole or by rows; it is on the disk in the end.

    `shapes` has all of them, in the order in which they come; no more are taken. NotFiniteError for values that are
    not finite; OSError.
    """
    with path.open("wb", buffering=0) as file:
        write_all(file, memoryview(_make_header(shapes, dtype)))
        for name, shape in shapes.items():
            left = prod(shape)
            while left:
                given, values = next(tensors)
                left -= values.numel()
                assert given == name and left >= 0, f"{given} comes where {name} should"
                part = values.detach().to("cpu", dtype).contiguous()
                if not all_finite(part):
                    raise NotFiniteError(
                        f"not saved: {name} has values that are not finite (NaN or infinity)"
                    )
                write_all(file, view_bytes(part))
                del values, part  # before the next one takes memory
        os.fsync(file.fileno())


def _make_header(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> bytes:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, shape in shapes.items():
        end = start + prod(shape) * dtype.itemsize
        header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": shape, "data_offsets": (start, end)}
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
