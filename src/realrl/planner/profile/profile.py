"""Profile file: measured times of model parts, collectives and copies on one kind of device.

A profile belongs to one kind of device, one number of processes per node, and one set of software versions. For CPU
processes with another number of threads, its times are scaled by the expected speedup. It holds the times of parts
of calls for any number of model shapes, as one TP rank computes them without communication. It also holds times
that depend on bytes alone: collectives, point-to-point messages and copies.

The speed of a process on a CPU depends on how many other processes compute at the same time, so all processes of a
node measure together.
"""

import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Literal, Self

import numpy as np
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, ValidationError

from realrl import __version__
from realrl.config.base import Settings
from realrl.config.errors import UserError
from realrl.config.explain import brief, explain
from realrl.config.json_file import read_json, write_readable
from realrl.config.paths import local_path
from realrl.families.shape import Mixture, ModelShape, split_kinds
from realrl.plan.placement import Dtype
from realrl.planner.profile.corrections import Correction
from realrl.program.arrays import Floats, Real


def read_versions() -> dict[str, str]:
    """Return the version of Python and of each relevant package, by name, without loading torch."""
    return {"python": platform.python_version(), "realrl": __version__, "torch": version("torch")}


@dataclass(frozen=True)
class Curve:
    """Time as a piecewise linear function of size. Times and sizes are above 0.

    Below the first point, the time is constant, because it consists of overhead. Above the last point, the last
    segment is extrapolated. Its slope is limited to between half and all of the last point's time per unit of size.
    """

    sizes: tuple[float, ...]
    seconds: tuple[float, ...]

    @classmethod
    def of(cls, points: Sequence[tuple[float, float]]) -> "Curve":
        """Build a curve from pairs (size, seconds) in any order. If a size was measured several times, the median
        counts.

        Raises ValueError if there are no points.
        """
        if not points:
            raise ValueError("a curve needs at least one point")
        groups: dict[float, list[float]] = {}
        for size, seconds in points:
            groups.setdefault(size, []).append(seconds)
        ordered = sorted((size, sorted(times)[len(times) // 2]) for size, times in groups.items())
        return cls(tuple(size for size, _ in ordered), tuple(seconds for _, seconds in ordered))

    def __call__(self, size: Real) -> Floats:
        sizes = self.sizes
        seconds = self.seconds
        mean = seconds[-1] / sizes[-1]
        slope = (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2]) if len(sizes) > 1 else mean
        beyond = np.maximum(size - sizes[-1], 0.0) * min(mean, max(mean / 2, slope))
        return np.asarray(np.interp(size, sizes, seconds) + beyond)


@dataclass(frozen=True)
class Surface:
    """Time as a function of context length and size. Each context has a curve, and times between two contexts are
    interpolated linearly.

    Outside the measured contexts, the nearest segment is extrapolated, but never below half of the lower one of its
    two curves.
    """

    contexts: tuple[float, ...]
    curves: tuple[Curve, ...]

    @classmethod
    def of(cls, points: Sequence[tuple[float, float, float]]) -> "Surface":
        """Build a surface from triples (context, size, seconds) in any order."""
        groups: dict[float, list[tuple[float, float]]] = {}
        for context, size, seconds in points:
            groups.setdefault(context, []).append((size, seconds))
        contexts = sorted(groups)
        return cls(tuple(contexts), tuple(Curve.of(groups[context]) for context in contexts))

    def __call__(self, context: Real, size: Real) -> Floats:
        if len(self.contexts) == 1:
            return self.curves[0](size)
        context, size = np.broadcast_arrays(context, size)
        contexts = np.array(self.contexts)
        i = np.clip(np.searchsorted(contexts, context, side="right") - 1, 0, len(contexts) - 2)
        table = np.array([curve(size) for curve in self.curves])
        low, high = (np.take_along_axis(table, j[None], 0)[0] for j in (i, i + 1))
        fraction = (context - contexts[i]) / (contexts[i + 1] - contexts[i])
        value = np.where(fraction == 1, high, low + (high - low) * fraction)
        return np.maximum(value, np.minimum(low, high) / 2)


FORMAT: Literal["realrl profile"] = "realrl profile"
VERSION: Literal[5] = 5
"""Version of the file format. Files of other versions are rejected."""

LayerKind = Literal[
    "embed",
    "embed_backward",
    "forward",
    "backward",
    "head",
    "head_backward",
    "scalar",
    "scalar_backward",
    "prefill",
    "start",
    "decode",
    "decode_overhead",
    "sample",
    "prepare",
    "optimizer",
    "product",
]
"""Measured parts of calls. Unless stated otherwise, they process a micro-batch of `tokens` tokens in sequences of
`context` tokens.

| part | measured time |
|---|---|
| embed | packing and embedding, before the first layer |
| forward | one layer |
| head, scalar | log-probabilities or values after the last layer, and the method's computation with them |
| embed_backward, backward, head_backward, scalar_backward | the time that a train call adds to the part above |
| prefill | one layer that stores its keys and values |
| start | the rest of a generate call before decoding, such as the keys and values of the last layer |
| decode | one layer of a decode step of `sequences` with `context` tokens each in the KV cache |
| decode_overhead | the rest of a decode step on every pipeline stage |
| sample | head and sampling of a decode step, on the last stage |
| prepare | a train call's work on `sequences` with answers of `context` tokens before its first mini-batch |
| optimizer | update of `tokens` parameters, without reducing or zeroing gradients |
| product | a product of two square matrices with `tokens` rows; it measures peak FLOP/s, not a part of a call |
"""

WHOLE: tuple[LayerKind, ...] = ("prepare", "optimizer", "product")
"""Kinds that do not depend on tensor parallelism. They are measured without it."""

CollectiveKind = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "send", "host", "copy", "clear", "allocate"
]
"""Collectives, messages and copies that are measured.

`send`: a message from one rank to another. `host`: a copy between device and host memory. `copy` and `clear`: a
copy and zeroing inside device memory. `allocate`: memory that is requested from the system and zeroed."""


class ShapeKey(Settings):
    """Model family and sizes that decide the times of layers, head and sampling."""

    family: str
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    heads: PositiveInt
    kv_heads: PositiveInt
    head_dim: PositiveInt
    vocab_size: PositiveInt
    window: PositiveInt | None = None
    mixture: Mixture | None = None

    @classmethod
    def of(cls, shape: ModelShape) -> "ShapeKey":
        """Return the key of a model."""
        return cls(**{name: getattr(shape, name) for name in cls.model_fields})


class Measurement(Settings):
    """Measured time of one part of a call. Sizes that do not matter for its kind are 0."""

    kind: LayerKind
    tp: PositiveInt = 1
    """TP degree. The time is for one TP rank."""
    tokens: NonNegativeInt = 0
    """Tokens of a micro-batch, or parameters of an optimizer update."""
    sequences: NonNegativeInt = 0
    """Sequences of a decode step, or sequences of a train call (`prepare`)."""
    context: NonNegativeInt = 0
    """Context length: tokens of each sequence."""
    seconds: PositiveFloat

    @property
    def size(self) -> int:
        """Number of sequences or of tokens, whichever determines the time of this kind."""
        return self.sequences if self.kind in _BY_SEQUENCES else self.tokens

    @property
    def key(self) -> tuple[object, ...]:
        """Key of the measurement. A newer measurement replaces an older one with the same key."""
        return *self.series, self.tokens, self.sequences, self.context

    @property
    def series(self) -> tuple[object, ...]:
        """Key shared by measurements that differ only in sizes."""
        return self.kind, self.tp


_BY_SEQUENCES = ("decode", "decode_overhead", "sample", "prepare")


class LayerTimes(Settings):
    """Measured times of one model shape in one data type."""

    shape: ShapeKey
    dtype: Dtype
    measurements: tuple[Measurement, ...] = Field(strict=False)


class CollectiveTime(Settings):
    """Measured time of a collective, a message or a copy."""

    kind: CollectiveKind
    ranks: PositiveInt
    """Number of participating ranks."""
    nodes: PositiveInt = 1
    """Number of nodes that the ranks span."""
    bytes: PositiveInt
    """Bytes of the whole tensor."""
    seconds: PositiveFloat

    @property
    def key(self) -> tuple[object, ...]:
        """Key of the measurement. A newer measurement replaces an older one with the same key."""
        return *self.series, self.bytes

    @property
    def series(self) -> tuple[object, ...]:
        """Key shared by times that differ only in bytes."""
        return self.kind, self.ranks, self.nodes


class FunctionTime(Settings):
    """Measured time of a user's function on the host."""

    function: str
    """Reference of the function, for example `reward.py:score`."""
    seconds: PositiveFloat
    """Seconds per item on one rank that calls the function."""
    steps: PositiveInt
    """Number of steps that were measured."""


class SweepSpread(Settings):
    """Differences between sweeps over all sizes: the root mean square of their shifts. The shift of a sweep is the
    median of ln(seconds / median of all sweeps) over its measurements."""

    layers: NonNegativeFloat = 0.0
    """Spread of the times of parts of calls."""
    transfers: NonNegativeFloat = 0.0
    """Spread of the times of collectives, messages and copies."""


class Profile(Settings):
    """Measured times of one kind of device. `save` writes a profile file, and `load` reads it."""

    format: Literal["realrl profile"] = FORMAT
    version: Literal[5] = VERSION
    device: str
    """Name of the device kind, as in a cluster description."""
    processes: PositiveInt = 1
    """Processes per node that measured at the same time."""
    threads: PositiveInt | None = None
    """Threads of each process on a CPU. If a profile lacks this number, it is assumed to equal that of the
    processes to plan for."""
    software: dict[str, str]
    """Versions by package. A profile of other versions is used, but a note is printed."""
    layers: tuple[LayerTimes, ...] = Field(default=(), strict=False)
    collectives: tuple[CollectiveTime, ...] = Field(default=(), strict=False)
    corrections: tuple[Correction, ...] = Field(default=(), strict=False)
    """Call times measured in runs, relative to predictions from the other fields (`calibrate_profile`)."""
    functions: tuple[FunctionTime, ...] = Field(default=(), strict=False)
    """Times of functions measured in runs (`calibrate_profile`)."""
    sweeps: SweepSpread | None = None
    """Differences between sweeps. None after a single sweep, and in older files."""

    def function_seconds(self, reference: str) -> float | None:
        """Look up the seconds per item of a function. Returns None if no run has measured it."""
        return next((time.seconds for time in self.functions if time.function == reference), None)

    def seconds(
        self,
        kind: LayerKind,
        shape: ModelShape,
        dtype: Dtype,
        tp: int,
        size: Real,
        context: Real = 0.0,
    ) -> Floats | None:
        """Interpolate measured times. Returns None if the kind was not measured for this shape, data type and TP
        degree.

        The result is exact at measured points, and linear in size and in context between them.
        """
        surface = self._surfaces.get((_key(shape), dtype, kind, tp))
        return None if surface is None else surface(context, size)

    def peak_flops(self, dtype: Dtype) -> float | None:
        """Find the largest FLOP/s of any measured product in a data type. Returns None if none was measured."""
        rates = [
            2 * m.tokens**3 / m.seconds
            for part in self.layers
            for m in part.measurements
            if m.kind == "product" and part.dtype == dtype
        ]
        return max(rates, default=None)

    def memory_bytes_per_s(self) -> float | None:
        """Find the bandwidth at which the largest measured copy reads and writes. Returns None if none was
        measured."""
        copies = [c for c in self.collectives if c.kind == "copy"]
        largest = max(copies, key=lambda c: c.bytes, default=None)
        return None if largest is None else 2 * largest.bytes / largest.seconds

    def collective(self, kind: CollectiveKind, ranks: int, nodes: int, number_bytes: Real) -> Floats | None:
        """Interpolate measured times of a collective. Returns None if it was not measured for this number of ranks
        and nodes."""
        curve = self._curves.get((kind, ranks, nodes))
        return None if curve is None else curve(number_bytes)

    def degrees(self, shape: ModelShape, dtype: Dtype) -> set[int]:
        """Return the TP degrees for which all kinds of layers of a model were measured in a data type."""
        keys = [(_key(kind.shape), dtype, "forward") for kind in split_kinds(shape)]
        found = [{tp for *measured, tp in self._surfaces if tuple(measured) == key} for key in keys]
        return set.intersection(*found)

    def save(self, path: str | Path) -> None:
        """Write the file that `load` reads."""
        content = {"format": self.format, "version": self.version}
        write_readable(Path(path), content | self.model_dump(mode="json", exclude_defaults=True))

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a profile file. Raises UserError if the file is not a profile of this version."""
        try:
            content = read_json(local_path(str(path)))
        except UserError as error:
            raise UserError(f"profile {error}") from None
        if content.get("format") != FORMAT:
            raise UserError(f"profile {path}: this is no file that `realrl profile` has written")
        if content.get("version") != VERSION:
            found = brief(content.get("version"))
            raise UserError(
                f"profile {path} has version {found}, not {VERSION}, which this version of realrl reads;"
                " measure again with `realrl profile`"
            )
        try:
            return cls.model_validate(content)
        except ValidationError as error:
            raise UserError(f"profile {path}: {explain(error, cls)}") from None

    def merged(self, layers: Iterable[LayerTimes], collectives: Iterable[CollectiveTime] = ()) -> Self:
        """Return a profile with further measurements, which replace older measurements with the same key."""
        times: dict[tuple[ShapeKey, Dtype], dict[object, Measurement]] = {}
        for part in (*self.layers, *layers):
            times.setdefault((part.shape, part.dtype), {}).update((m.key, m) for m in part.measurements)
        parts = (
            LayerTimes(shape=shape, dtype=dtype, measurements=tuple(by_key.values()))
            for (shape, dtype), by_key in times.items()
        )
        everything = {c.key: c for c in (*self.collectives, *collectives)}
        changes = {"layers": tuple(parts), "collectives": tuple(everything.values())}
        return type(self)(**{**{n: getattr(self, n) for n in type(self).model_fields}, **changes})

    @cached_property
    def _surfaces(self) -> Mapping[tuple[object, Dtype, str, int], Surface]:
        groups: dict[tuple[object, Dtype, str, int], list[tuple[float, float, float]]] = {}
        for part in self.layers:
            for m in part.measurements:
                key = _key(part.shape), part.dtype, m.kind, m.tp
                groups.setdefault(key, []).append((m.context, m.size, m.seconds))
        return {key: Surface.of(points) for key, points in groups.items()}

    @cached_property
    def _curves(self) -> Mapping[tuple[str, int, int], Curve]:
        groups: dict[tuple[str, int, int], list[tuple[float, float]]] = {}
        for c in self.collectives:
            groups.setdefault((c.kind, c.ranks, c.nodes), []).append((c.bytes, c.seconds))
        return {key: Curve.of(points) for key, points in groups.items()}


def _key(shape: ModelShape | ShapeKey) -> tuple[object, ...]:
    return tuple(getattr(shape, name) for name in ShapeKey.model_fields)
