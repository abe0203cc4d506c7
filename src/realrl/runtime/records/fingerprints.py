"""Fingerprints of a model's parameters, which do not depend on its layout."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor

from realrl.checkpoint.contents import list_counted
from realrl.engine.model import Model

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
    return {
        local.spec.name: Fingerprint.of(values)
        for held in model.sets.values()
        for local, _, values in list_counted(model, held)
    }


def add_fingerprints(parts: Iterable[Fingerprints]) -> dict[str, Fingerprint]:
    """Add the fingerprints of the ranks."""
    total: dict[str, Fingerprint] = {}
    for part in parts:
        for name, one in part.items():
            total[name] = total.get(name, Fingerprint()) + one
    return total
