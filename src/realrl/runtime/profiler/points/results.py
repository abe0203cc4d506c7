"""Results store: the entries of a profile measured so far."""

from collections.abc import Hashable
from typing import Literal

from realrl.plan.placement import Dtype
from realrl.planner.profile.profile import (
    CollectiveTime,
    LayerTimes,
    Measurement,
    Profile,
    ShapeKey,
    SweepSpread,
)


class ResultsStore:
    """Growing profile."""

    def __init__(self, profile: Profile, *, again: bool = False) -> None:
        """Start from `profile`; with `again`, its entries are replaced as they are measured again."""
        self._old = profile
        self.collectives: dict[Hashable, CollectiveTime] = {}
        self._layers: dict[tuple[ShapeKey, Dtype], dict[Hashable, Measurement]] = {}
        self._sweeps = None if again else profile.sweeps
        if not again:
            self.collectives |= {c.key: c for c in profile.collectives}
            self._layers |= {(p.shape, p.dtype): {m.key: m for m in p.measurements} for p in profile.layers}

    def layers(self, shape: ShapeKey, dtype: Dtype) -> dict[Hashable, Measurement]:
        """Find the times of a shape in a data type, by what was measured."""
        return self._layers.setdefault((shape, dtype), {})

    def add_spread(self, kind: Literal["layers", "transfers"], spread: float | None) -> None:
        """Note how far the sweeps of a part differed; the largest of several counts."""
        if spread is not None:
            old = self._sweeps or SweepSpread()
            self._sweeps = old.model_copy(update={kind: max(getattr(old, kind), spread)})

    @property
    def profile(self) -> Profile:
        """Profile of all results."""
        parts = [
            LayerTimes(shape=shape, dtype=dtype, measurements=tuple(times.values()))
            for (shape, dtype), times in self._layers.items()
        ]
        merged = self._old.merged(parts, self.collectives.values())
        return merged.model_copy(update={"sweeps": self._sweeps})
