"""Measured times, in a file that can be read, reused and compared.

A profile is of one kind of device, one number of processes that share a node, and one set of software versions. It
holds times of parts of calls for any number of model shapes, as one tensor rank computes them without
communication, and times of what depends on bytes alone: collectives, messages and copies.

What a process reaches on a CPU depends on how many others compute meanwhile, so all of them measure together.
"""

import json
import re
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, ValidationError

from realrl.config.base import Settings
from realrl.config.errors import UserError
from realrl.config.explain import brief, explain
from realrl.config.files import write_whole
from realrl.config.json_file import read_json
from realrl.config.paths import local_path
from realrl.families.shape import ModelShape
from realrl.plan.placement import Dtype
from realrl.planner.profile.corrections import Correction
from realrl.planner.profile.curves import Curve, Surface

FORMAT: Literal["realrl profile"] = "realrl profile"
VERSION: Literal[1] = 1
"""Of the file format; a file of another version is refused."""

LayerKind = Literal[
    "enter",
    "enter_backward",
    "forward",
    "backward",
    "head",
    "head_backward",
    "scalar",
    "scalar_backward",
    "bucket_enter",
    "bucket",
    "bucket_backward",
    "prefill",
    "start",
    "decode",
    "turn",
    "sample",
    "prepare",
    "optimizer",
]
"""What takes the time, of a micro-batch of `tokens` in sequences of `context` tokens where nothing else is said.

enter: what comes before the first layer, packing and embedding. forward: one layer. head, scalar: what comes after
the last one, log-probabilities or values, and what the method of the call makes of them. These are of inference
calls; enter_backward, backward, head_backward and scalar_backward are what train calls add to them, so that the
two together are forward, loss and backward. bucket_enter, bucket, bucket_backward: what each further group of
sequences of like length, which attention on a CPU computes one by one, adds to enter, forward and backward.
prefill: one layer, its keys and values stored. start: all else of a generate call until it has the first token of
each sequence. decode: one layer, one token for each of `sequences` with `context` tokens in the cache. turn: what
every pipeline stage does besides. sample: what the last one does, to draw the tokens. prepare: what a train call
does with `sequences` before its first mini-batch, for answers of `context` tokens. optimizer: update of `tokens`
parameters whose gradients have been added up and still are to be cleared."""

WHOLE: tuple[LayerKind, ...] = ("prepare", "optimizer")
"""Measured without tensor parallelism, which they do not depend on."""

CollectiveKind = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "send", "host", "copy", "clear", "allocate"
]
"""send: from one rank to another. host: from device to host memory or back. copy, clear: inside device memory.
allocate: memory that is taken from the system, and cleared."""


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
    """Of a micro-batch; parameters of an update."""
    sequences: NonNegativeInt = 0
    """That get one more token, or are prepared."""
    context: NonNegativeInt = 0
    """Tokens of each sequence."""
    seconds: PositiveFloat

    @property
    def size(self) -> int:
        """What the time grows with."""
        return self.sequences if self.kind in _BY_SEQUENCES else self.tokens

    @property
    def key(self) -> tuple[object, ...]:
        """What was measured."""
        return *self.series, self.tokens, self.sequences, self.context

    @property
    def series(self) -> tuple[object, ...]:
        """Equal for what differs in sizes alone."""
        return self.kind, self.tp


_BY_SEQUENCES = ("decode", "turn", "sample", "prepare")


class LayerTimes(Settings):
    """All times of one shape in one precision."""

    shape: ShapeKey
    dtype: Dtype
    measurements: tuple[Measurement, ...] = Field(strict=False)

    @cached_property
    def surfaces(self) -> Mapping[tuple[str, int], Surface]:
        """(kind, tp) -> its times."""
        groups: dict[tuple[str, int], list[tuple[float, float, float]]] = {}
        for m in self.measurements:
            groups.setdefault((m.kind, m.tp), []).append((m.context, m.size, m.seconds))
        return {key: Surface.of(points) for key, points in groups.items()}


class CollectiveTime(Settings):
    """One time of what depends on bytes alone: a collective, a message or a copy."""

    kind: CollectiveKind
    ranks: PositiveInt
    """Ranks that take part."""
    nodes: PositiveInt = 1
    """Nodes that they lie on."""
    bytes: PositiveInt
    """Of the whole tensor."""
    seconds: PositiveFloat

    @property
    def key(self) -> tuple[object, ...]:
        """What was measured."""
        return *self.series, self.bytes

    @property
    def series(self) -> tuple[object, ...]:
        """Equal for what differs in size alone."""
        return self.kind, self.ranks, self.nodes


class FunctionTime(Settings):
    """What a function of the user's takes on the host."""

    function: str
    """Its reference, for example `reward.py:score`."""
    seconds: PositiveFloat
    """Per item, of one rank that calls it."""
    steps: PositiveInt
    """Steps that were measured."""


class Profile(Settings):
    """What was measured. Write it with `save`, read it with `load`."""

    format: Literal["realrl profile"] = FORMAT
    version: Literal[1] = VERSION
    device: str
    """Name of the kind of device, as in a cluster description."""
    processes: PositiveInt = 1
    """That measured side by side on each node."""
    software: dict[str, str]
    """Package -> version; a profile of other versions is used, and that is said."""
    layers: tuple[LayerTimes, ...] = Field(default=(), strict=False)
    collectives: tuple[CollectiveTime, ...] = Field(default=(), strict=False)
    corrections: tuple[Correction, ...] = Field(default=(), strict=False)
    """What runs have measured, in relation to what the rest predicts for them (`calibrate`)."""
    functions: tuple[FunctionTime, ...] = Field(default=(), strict=False)
    """What runs have measured of functions (`calibrate`)."""

    def function_seconds(self, reference: str) -> float | None:
        """Seconds per item of a function; None where no run has measured it."""
        return next((time.seconds for time in self.functions if time.function == reference), None)

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

        Exact at measured points; between them linear in size and in context.
        """
        surface = self._surfaces.get((_key(shape), element_bytes, kind, tp))
        return None if surface is None else surface(context, size)

    def collective(self, kind: CollectiveKind, ranks: int, nodes: int, number_bytes: float) -> float | None:
        """Interpolated time; None where it was not measured among so many ranks on so many nodes."""
        curve = self._curves.get((kind, ranks, nodes))
        return None if curve is None else curve(number_bytes)

    def degrees(self, shape: ModelShape, element_bytes: int) -> set[int]:
        """Tensor-parallel degrees of which layers of a model were measured in a precision."""
        key = (_key(shape), element_bytes, "forward")
        return {tp for *found, tp in self._surfaces if tuple(found) == key}

    def save(self, path: str | Path) -> None:
        """Write the file that `load` reads."""
        content = {"format": self.format, "version": self.version}
        text = json.dumps(content | self.model_dump(mode="json", exclude_defaults=True), indent=1)
        # A measurement on each line.
        text = re.sub(r"\{[^{}]*\}", lambda found: re.sub(r"\s*\n\s*", " ", found[0]), text)
        write_whole(Path(path), text + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a file; UserError where it is not a profile of this version."""
        try:
            content = read_json(local_path(str(path)))
        except UserError as error:
            raise UserError(f"profile {error}") from None
        if content.get("format") != FORMAT:
            raise UserError(f"profile {path}: this is no file that `realrl profile` has written")
        if content.get("version") != VERSION:
            found = brief(content.get("version"))
            raise UserError(f"profile {path} has version {found}, not {VERSION}; measure again")
        try:
            return cls.model_validate(content)
        except ValidationError as error:
            raise UserError(f"profile {path}: {explain(error, cls)}") from None

    def merged(self, layers: Iterable[LayerTimes], collectives: Iterable[CollectiveTime] = ()) -> Self:
        """With further measurements, which replace older ones of the same thing."""
        times: dict[tuple[ShapeKey, Dtype], dict[object, Measurement]] = {}
        for part in (*self.layers, *layers):
            times.setdefault((part.shape, part.dtype), {}).update((m.key, m) for m in part.measurements)
        parts = (
            LayerTimes(shape=shape, dtype=dtype, measurements=tuple(found.values()))
            for (shape, dtype), found in times.items()
        )
        everything = {c.key: c for c in (*self.collectives, *collectives)}
        changes = {"layers": tuple(parts), "collectives": tuple(everything.values())}
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
