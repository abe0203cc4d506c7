"""Bytes of gradients and optimizer state under each stage of ZeRO."""

from dataclasses import dataclass
from typing import Any

_FLOAT32 = 4


@dataclass(frozen=True)
class TrainingState:
    """Bytes of a rank: numbers, or arrays of them, as elements and data-parallel degrees are."""

    gradients: Any
    """What is accumulated of gradients."""
    optimizer: Any
    """Moments, master weights and, where data-parallel ranks accumulate all gradients, their reduced part."""
    kept: Any
    """What of this persists between steps."""

    @property
    def bytes(self) -> Any:
        """All of it, in device memory."""
        return self.gradients + self.optimizer


def count_training_state(zero: int, dp: Any, elements: Any, element_bytes: int) -> TrainingState:
    """Count the bytes of a rank that accumulates the gradients of so many elements, with parameters of a width.

    These are all that it computes with under ZeRO-1, else the rows that it updates. Float32 master weights exist
    below float32, and under ZeRO-2, where a rank updates copies of its rows.
    """
    masters = element_bytes < _FLOAT32 or zero == 2
    parts, divisor = 2 + masters, dp if zero == 1 else 1
    reduced = divisor > 1
    return TrainingState(
        gradients=_FLOAT32 * elements,
        optimizer=_FLOAT32 * (parts + reduced) * elements // divisor,
        kept=_FLOAT32 * parts * elements // divisor,
    )
