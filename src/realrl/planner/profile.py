"""Measured times, in a file that can be read, reused and compared.

A profile is of one kind of device and one set of software versions. It holds times of single layers for any number
of model shapes, as one tensor rank computes them without communication, and times of collectives.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, ValidationError

from realrl.config.base import Settings
from realrl.config.errors import UserError
from realrl.config.explain import explain
from realrl.config.shape import ModelShape
from realrl.planner.curves import Curve, Surface

VERSION: Literal[1] = 1
"""Of the file format; a file of another version is refused."""

LayerKind = Literal[
    "forward",
    "backward",
    "head",
    "head_backward",
    "scalar",
    "scalar_backward",
    "decode",
    "sample",
    "optimizer",
]
"""forward, backward: one layer. head, scalar: log-probabilities or values of a micro-batch. decode: one layer,
one token for each of `sequences`. sample: logits and next tokens. optimizer: one update of `tokens` parameters."""

CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter", "send", "host"]
"""host: a copy between device and host memory."""


class ShapeKey(Settings):
    """Sizes that the time of a layer, of the head and of sampling depend on."""

    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    heads: PositiveInt
    kv_heads: PositiveInt
    head_dim: PositiveInt
    vocab_size: PositiveInt

    @classmethod
    def of(cls, shape: ModelShape) -> "ShapeKey":
        """The key of a model."""
        return cls(**{name: getattr(shape, name) for name in cls.model_fields})


class Measurement(Settings):
    """One time. What does not matter for its kind is 0."""

    kind: LayerKind
    tp: PositiveInt = 1
    """Tensor-parallel degree; what one of so many ranks computes was measured."""
    tokens: NonNegativeInt = 0
    """Tokens of a micro-batch; parameters of an update."""
    sequences: NonNegativeInt = 0
    """Sequences that get one more token."""
    context: NonNegativeInt = 0
    """Tokens of each sequence; in the cache, where one is decoded."""
    seconds: PositiveFloat

    @property
    def size(self) -> int:
        """What the time grows with."""
        return self.sequences if self.kind in ("decode", "sample") else self.tokens


class LayerTimes(Settings):
    """All times of one shape in one precision."""

    shape: ShapeKey
    dtype: Literal["float32", "bfloat16"]
    measurements: tuple[Measurement, ...] = Field(strict=False)

    @cached_property
    def surfaces(self) -> Mapping[tuple[str, int], Surface]:
        """(kind, tp) -> its times."""
        groups: dict[tuple[str, int], list[tuple[float, float, float]]] = {}
        for m in self.measurements:
            groups.setdefault((m.kind, m.tp), []).append((m.context, m.size, m.seconds))
        return {key: Surface.of(points) for key, points in groups.items()}


class CollectiveTime(Settings):
    """One time of one collective."""

    kind: CollectiveKind
    ranks: PositiveInt
    """Ranks that take part."""
    nodes: PositiveInt = 1
    """Nodes that they lie on."""
    bytes: PositiveInt
    """Of the whole tensor."""
    seconds: PositiveFloat


class Profile(Settings):
    """What was measured. Write it with `save`, read it with `load`."""

    format: Literal["realrl profile"] = "realrl profile"
    version: Literal[1] = 1
    device: str
    """Name of the kind of device, as in a cluster description."""
    software: dict[str, str]
    """Package -> version; a profile of other versions is still used, but said to be old."""
    layers: tuple[LayerTimes, ...] = Field(default=(), strict=False)
    collectives: tuple[CollectiveTime, ...] = Field(default=(), strict=False)

    def seconds(
        self,
        kind: LayerKind,
        shape: ModelShape,
        element_bytes: int,
        tp: int,
        size: float,
        context: float = 0,
    ) -> float | None:
        """Interpolated time; None where this kind was not measured for the shape, precision and degree.

        Exact at measured points; between them linear in the logarithms of size and time, and linear in context.
        """
        surface = self._surfaces.get((_key(shape), element_bytes, kind, tp))
        return None if surface is None else surface(context, size)

    def collective(self, kind: CollectiveKind, ranks: int, nodes: int, number_bytes: float) -> float | None:
        """Interpolated time; None where it was not measured among so many ranks on so many nodes."""
        curve = self._curves.get((kind, ranks, nodes))
        return None if curve is None else curve(number_bytes)

    def save(self, path: str | Path) -> None:
        """Write the file that `load` reads."""
        text = json.dumps(self.model_dump(mode="json"), indent=1)
        Path(path).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a file; UserError where it is not a profile of this version."""
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"profile {path} cannot be read: {error}") from None
        if isinstance(content, dict) and content.get("version") != VERSION:
            found = content.get("version")
            raise UserError(f"profile {path} has version {found}, not {VERSION}; measure again")
        try:
            return cls.model_validate(content)
        except ValidationError as error:
            raise UserError(f"profile {path}: {explain(error, cls)}") from None

    def merged(self, layers: Iterable[LayerTimes], collectives: Sequence[CollectiveTime] = ()) -> Self:
        """With further measurements; those of the same shape and precision, or any collectives, replace older
        ones."""
        times = {(part.shape, part.dtype): part for part in (*self.layers, *layers)}
        changes = {"layers": tuple(times.values()), "collectives": tuple(collectives) or self.collectives}
        return type(self)(**{**{n: getattr(self, n) for n in type(self).model_fields}, **changes})

    @cached_property
    def _surfaces(self) -> Mapping[tuple[object, int, str, int], Surface]:
        return {
            (tuple(part.shape.model_dump().values()), 2 if part.dtype == "bfloat16" else 4, *key): surface
            for part in self.layers
            for key, surface in part.surfaces.items()
        }

    @cached_property
    def _curves(self) -> Mapping[tuple[str, int, int], Curve]:
        groups: dict[tuple[str, int, int], list[tuple[float, float]]] = {}
        for c in self.collectives:
            groups.setdefault((c.kind, c.ranks, c.nodes), []).append((c.bytes, c.seconds))
        return {key: Curve.of(points) for key, points in groups.items()}


def _key(shape: ModelShape) -> tuple[object, ...]:
    return tuple(getattr(shape, name) for name in ShapeKey.model_fields)
