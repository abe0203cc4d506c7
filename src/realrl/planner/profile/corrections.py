"""Correction factors for predicted call times, measured in runs."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from pydantic import (
    Field,
    PositiveFloat,
    PositiveInt,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from realrl.config.base import Settings
from realrl.dataflow.call import Call, Kind
from realrl.families.shape import Head, ModelShape
from realrl.plan.axes import Degrees, axis_names
from realrl.plan.placement import Dtype, Strategy
from realrl.program.memory import StoredModel

_PARALLEL = 8
"""Distance between two strategies if only one of them uses a parallel dimension. All other terms of the distance
together are smaller."""
_DEGREE = 2
"""Distance between two different degrees above 1 of one parallel dimension."""


class CorrectedShape(ModelShape):
    """Shape of a model in a profile file, which must name the model's family."""

    family: str


class Correction(Settings):
    """Measured time of a call relative to its prediction from a profile without corrections."""

    call: str
    kind: Kind = Field(strict=False)
    shape: CorrectedShape
    head: Head
    dtype: Dtype
    degrees: dict[str, PositiveInt]
    """Degree of each axis. In a file, each axis is a separate field."""
    micro_batch_tokens: PositiveInt
    sequence_parallel: bool
    recompute: bool
    zero_bubble: bool = False
    exact: bool = False
    ratio: PositiveFloat
    """Measured over predicted seconds."""
    steps: PositiveInt
    """Number of steps that were measured."""

    @classmethod
    def of(cls, call: Call, model: StoredModel, strategy: Strategy, ratio: float, steps: int) -> Self:
        """Build the correction of a call from its measured ratio."""
        return cls(
            call=call.name,
            kind=call.kind,
            shape=CorrectedShape(**model.shape.model_dump()),
            head=model.head,
            dtype=model.dtype_under(strategy),
            degrees=strategy.all_degrees.named(),
            micro_batch_tokens=strategy.micro_batch_tokens,
            sequence_parallel=strategy.sequence_parallel,
            recompute=strategy.recompute,
            zero_bubble=strategy.zero_bubble,
            exact=model.exact,
            ratio=ratio,
            steps=steps,
        )

    @model_validator(mode="before")
    @classmethod
    def _gather_degrees(cls, given: Any) -> Any:
        if not isinstance(given, Mapping) or "degrees" in given:
            return given
        degrees = {axis: given[axis] for axis in axis_names() if axis in given}
        return {**{name: value for name, value in given.items() if name not in degrees}, "degrees": degrees}

    @model_serializer(mode="wrap")
    def _spread_degrees(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = serialize(self)
        return {**fields.pop("degrees"), **fields}

    @property
    def about(self) -> tuple[object, ...]:
        """Key of the measured call. A newer correction replaces an older one with the same key."""
        fields = {name: getattr(self, name) for name in type(self).model_fields if name not in _OUTCOME}
        return tuple({**fields, "degrees": Degrees.of(self.degrees)}.values())

    def distance(self, call: Call, model: StoredModel, strategy: Strategy) -> int | None:
        """Compute the distance to another call. It is 0 for an identical call, and None for another kind of call or
        another model."""
        same = (self.kind, _structure(self.shape), self.head, self.dtype, self.exact)
        theirs = (call.kind, _structure(model.shape), model.head, model.dtype_under(strategy), model.exact)
        if same != theirs:
            return None
        pairs = [*zip(Degrees.of(self.degrees).values, strategy.all_degrees.values, strict=True)]
        parallel = sum((mine > 1) != (theirs > 1) for mine, theirs in pairs)
        degrees = sum(mine != theirs for mine, theirs in pairs)
        others = (
            self.call != call.name,
            self.micro_batch_tokens != strategy.micro_batch_tokens,
            self.sequence_parallel != strategy.sequence_parallel,
            self.recompute != strategy.recompute,
            self.zero_bubble != strategy.zero_bubble,
        )
        return _PARALLEL * parallel + _DEGREE * degrees + sum(others)


_OUTCOME = ("ratio", "steps")


_FREE = {"max_positions", "rope_theta", "rope_scaling", "norm_eps", "init_std"}
"""Fields of a shape that the time of a call does not depend on."""


def _structure(shape: ModelShape) -> dict[str, object]:
    """Return the fields of a shape that the time of a call depends on."""
    return shape.model_dump(exclude=_FREE)


@dataclass(frozen=True)
class Nearest:
    """Corrections with the smallest distance to a call."""

    distance: int
    """Distance of these corrections. It is 0 if a run has measured the call itself under the same strategy."""
    corrections: tuple[Correction, ...]

    @property
    def ratio(self) -> float:
        """Geometric mean of the ratios, weighted by steps."""
        weight = sum(c.steps for c in self.corrections)
        return math.exp(sum(c.steps * math.log(c.ratio) for c in self.corrections) / weight)


def find_nearest(
    corrections: Iterable[Correction], call: Call, model: StoredModel, strategy: Strategy
) -> Nearest | None:
    """Find the nearest corrections of the same kind of call with the same model. Returns None if there are none."""
    distances = [(c.distance(call, model, strategy), c) for c in corrections]
    least = min((distance for distance, _ in distances if distance is not None), default=None)
    return (
        None if least is None else Nearest(least, tuple(c for distance, c in distances if distance == least))
    )


def find_correction(
    corrections: Iterable[Correction], call: Call, model: StoredModel, strategy: Strategy
) -> float:
    """Find the factor for a predicted time. It is the ratio of the nearest corrections, or 1 if there are none.

    Only corrections of the same kind of call with the same model count. Several corrections at the same distance
    are averaged geometrically, weighted by their steps.
    """
    nearest = find_nearest(corrections, call, model, strategy)
    return 1.0 if nearest is None else nearest.ratio
