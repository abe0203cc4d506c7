"""How far the batches under way are, as heartbeats publish it. Does not import torch."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self


@dataclass(frozen=True, kw_only=True)
class CallProgress:
    """How far a call is with a batch. It counts the items whose outputs a rank has, or those of all ranks."""

    order: int
    """Position of the call among the calls that a batch passes."""
    parts: int
    """Number of steps in which the call has worked on the batch."""
    span: int
    """Number of steps over which the call spreads the batch."""
    rows: int
    """Number of items on which the call has worked."""
    going_on: int = 0
    """Number of these items whose answers the next step continues."""


@dataclass(frozen=True, kw_only=True)
class BatchProgress:
    """How far a batch is that is not trained on yet."""

    step: int
    """Step that trains on the batch, counted from 1."""
    weights: int
    """Number of finished training steps when the first tokens of the batch were sampled."""
    size: int
    """Number of items."""
    calls: dict[str, CallProgress] = field(default_factory=dict)
    """Calls that have worked on the batch."""

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON values."""
        return asdict(self)

    @classmethod
    def parse(cls, found: Any) -> Self:
        """Read what `to_json` returned. Raises ValueError if it is malformed."""
        try:
            calls = {str(name): CallProgress(**call) for name, call in found["calls"].items()}
            batch = cls(step=found["step"], weights=found["weights"], size=found["size"], calls=calls)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"progress of a batch: {error!r}") from None
        numbers = [
            batch.step,
            batch.weights,
            batch.size,
            *(n for c in calls.values() for n in vars(c).values()),
        ]
        if not all(isinstance(number, int) for number in numbers):
            raise ValueError("progress of a batch: a number is missing")
        return batch


def merge_progress(ranks: Iterable[Iterable[BatchProgress]]) -> tuple[BatchProgress, ...]:
    """Add up what each rank has done, by batch. A call is as far as the rank that is furthest, and counts the items
    of the ranks that are equally far."""
    merged: dict[int, BatchProgress] = {}
    for batch in (batch for batches in ranks for batch in batches):
        calls = merged.setdefault(batch.step, replace(batch, calls={})).calls
        for name, call in batch.calls.items():
            before = calls.get(name)
            if before is None or before.parts < call.parts:
                calls[name] = call
            elif before.parts == call.parts:
                rows, going_on = before.rows + call.rows, before.going_on + call.going_on
                calls[name] = replace(before, rows=rows, going_on=going_on)
    return tuple(
        replace(batch, calls=dict(sorted(batch.calls.items(), key=lambda item: item[1].order)))
        for _, batch in sorted(merged.items())
    )
