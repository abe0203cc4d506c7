"""What has been measured so far."""

from collections.abc import Hashable

from realrl.plan.placement import Dtype
from realrl.planner.profile.profile import CollectiveTime, LayerTimes, Measurement, Profile, ShapeKey


class Notebook:
    """A profile that grows."""

    def __init__(self, profile: Profile, *, again: bool = False) -> None:
        """With `again`, what `profile` holds is kept until it has been measured again, but not relied on."""
        self._old = profile
        self.collectives: dict[Hashable, CollectiveTime] = {}
        self._layers: dict[tuple[ShapeKey, Dtype], dict[Hashable, Measurement]] = {}
        if not again:
            self.collectives |= {c.key: c for c in profile.collectives}
            self._layers |= {(p.shape, p.dtype): {m.key: m for m in p.measurements} for p in profile.layers}

    def layers(self, shape: ShapeKey, dtype: Dtype) -> dict[Hashable, Measurement]:
        """Times of a shape in a precision, by what was measured."""
        return self._layers.setdefault((shape, dtype), {})

    @property
    def profile(self) -> Profile:
        """All of it."""
        parts = [
            LayerTimes(shape=shape, dtype=dtype, measurements=tuple(times.values()))
            for (shape, dtype), times in self._layers.items()
        ]
        return self._old.merged(parts, self.collectives.values())
