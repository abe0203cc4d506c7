"""Fingerprints of a model's parameters, which do not depend on its layout."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor

from realrl.engine.model import Model
from realrl.engine.training.gradients import find_counted_elements

_CHUNK = 1 << 22
"""Elements that are converted at a time."""
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Fingerprint:
    """Sums over the elements of a tensor, or of a part of it."""

    bits: int = 0
    """Sum of the elements' bit patterns as integers. It changes if one bit of one element changes."""
    squares: float = 0.0
    """Sum of squares."""
    dtype: str = ""
    """Data type of the elements."""

    def __add__(self, other: "Fingerprint") -> "Fingerprint":
        bits, squares = self.bits + other.bits, self.squares + other.squares
        return Fingerprint(bits, squares, self.dtype or other.dtype)

    @property
    def norm(self) -> float:
        return sqrt(self.squares)

    @classmethod
    def of(cls, values: Tensor) -> "Fingerprint":
        """Compute the fingerprint of a flat tensor."""
        found = cls(dtype=str(values.dtype).removeprefix("torch."))
        for part in values.detach().split(_CHUNK):
            words = part.view(_WORDS[part.element_size()]).to(torch.int64)
            found += cls(int(words.sum()), float(part.double().square().sum()))
        return found


Fingerprints = Mapping[str, Fingerprint]
"""Fingerprints of tensors, by the names of the tensors."""


def take_fingerprints(model: Model) -> dict[str, Fingerprint]:
    """Take the fingerprints of the parameters that this rank counts.

    The sums over all ranks of the model's placement are the fingerprints of the whole tensors.
    """
    found: dict[str, Fingerprint] = {}
    data = model.groups.data
    for held in model.sets.values():
        placement = held.layout.placement
        if placement.is_copy(model.rank):
            continue
        sharded = placement.strategy.shards_parameters
        flat = held.memory.find_values(held.buffer.data)
        for i, local in enumerate(held.layout.tensors(model.rank)):
            first, end = find_counted_elements(model, local)
            end = min(end, local.region.numel)
            # Data-parallel ranks with equal copies divide the tensors among themselves.
            if (sharded or i % data.size == data.index) and first < end:
                start = held.buffer.offset(local.region.tensor)
                found[local.spec.name] = Fingerprint.of(flat[start + first : start + end])
    return found


def add_fingerprints(parts: Iterable[Fingerprints]) -> dict[str, Fingerprint]:
    """Add the fingerprints of the ranks."""
    total: dict[str, Fingerprint] = {}
    for part in parts:
        for name, one in part.items():
            total[name] = total.get(name, Fingerprint()) + one
    return total
