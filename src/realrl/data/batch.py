"""Batches of variable-length rows without padding."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

KEY_DTYPES = {
    "int64": torch.int64,
    "int32": torch.int32,
    "int16": torch.int16,
    "float32": torch.float32,
    "float64": torch.float64,
}
"""Types of the values of keys: name in `Key.dtype` -> torch type."""


_ALIGNMENT = 16
"""Alignment in bytes of tensors that share a copy."""


def copy_to_device(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copy tensors in host memory to a device, in one asynchronous copy."""
    if device.type == "cpu":
        return list(tensors)
    sizes = [-(-t.nbytes // _ALIGNMENT) * _ALIGNMENT for t in tensors]
    # Only copies from pinned memory are asynchronous; torch keeps the memory until they end.
    pinned = device.type == "cuda"
    together = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=pinned)
    for part, tensor in zip(together.split(sizes), tensors, strict=True):
        part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
    there = together.to(device, non_blocking=True).split(sizes)
    return [
        part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for part, tensor in zip(there, tensors, strict=True)
    ]


def copy_numbers(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Copy numbers to a device asynchronously. -> [len(numbers)] int64"""
    return copy_to_device([torch.tensor(numbers, dtype=torch.int64)], device)[0]


@dataclass(frozen=True, eq=False)
class Ragged:
    """Rows of different lengths, stored back to back.

    values: [sum(lengths)], or [sum(lengths), width] if each position has several numbers.
    """

    values: Tensor
    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        assert self.values.dim() in (1, 2) and len(self.values) == sum(self.lengths), (
            "rows do not fill the values"
        )

    def __len__(self) -> int:
        return len(self.lengths)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Start of each row, and the end of the last one: len(lengths) + 1 numbers."""
        out = [0]
        for length in self.lengths:
            out.append(out[-1] + length)
        return tuple(out)

    def row(self, i: int) -> Tensor:
        """Return row i, a view. [lengths[i]] or [lengths[i], width]"""
        return self.values[self.offsets[i] : self.offsets[i + 1]]

    def rows(self) -> list[Tensor]:
        """List all rows, as views."""
        return list(self.values.split(self.lengths)) if self.lengths else []

    def select(self, indices: Sequence[int]) -> "Ragged":
        """Copy the rows at `indices`, in that order."""
        if not len(indices):
            return Ragged(self.values[:0], ())
        return Ragged.of([self.row(i) for i in indices], dtype=self.values.dtype)

    @classmethod
    def of(cls, rows: Iterable[Tensor | Sequence[float]], *, dtype: torch.dtype | None = None) -> "Ragged":
        """Concatenate rows. `dtype` is required if there are no rows."""
        tensors = [torch.as_tensor(row, dtype=dtype) for row in rows]
        values = torch.cat(tensors) if tensors else torch.empty(0, dtype=dtype)
        return cls(values, tuple(len(t) for t in tensors))

    @classmethod
    def scalars(cls, values: Tensor) -> "Ragged":
        """Make one row per number. values: [N]"""
        return cls(values, (1,) * values.numel())

    def to(self, device: torch.device) -> "Ragged":
        return Ragged(_move([self.values], device)[0], self.lengths)


@dataclass(frozen=True, eq=False)
class Batch:
    """Items of one step. `fields` maps each key that is known so far to one row per item.

    `ids[i]` is the position of item i in the step's global batch.
    """

    ids: tuple[int, ...]
    fields: dict[str, Ragged]

    def __post_init__(self) -> None:
        for key, field in self.fields.items():
            assert len(field) == len(self.ids), f"{key}: {len(field)} rows for {len(self.ids)} items"

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, key: str) -> Ragged:
        return self.fields[key]

    def select(self, positions: Sequence[int]) -> "Batch":
        """Copy the items at these positions of this batch, in that order."""
        ids = tuple(self.ids[i] for i in positions)
        return Batch(ids, {key: field.select(positions) for key, field in self.fields.items()})

    def with_fields(self, **fields: Ragged) -> "Batch":
        return Batch(self.ids, {**self.fields, **fields})

    def without(self, keys: Collection[str]) -> "Batch":
        return Batch(self.ids, {key: field for key, field in self.fields.items() if key not in keys})

    def to(self, device: torch.device) -> "Batch":
        values = _move([field.values for field in self.fields.values()], device)
        moved = zip(self.fields.items(), values, strict=True)
        return Batch(self.ids, {key: Ragged(there, field.lengths) for (key, field), there in moved})


def _move(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Move tensors to a device. Tensors in host memory share one copy."""
    host = [tensor for tensor in tensors if tensor.device.type == "cpu"]
    moved = iter(copy_to_device(host, device))
    return [next(moved) if tensor.device.type == "cpu" else tensor.to(device) for tensor in tensors]
