"""Axes of a mesh: what the ranks along each axis divide among themselves, and how coordinates number the ranks.

Only this module lists the axes. Strategies, plan files, process groups, layouts and the planner derive from its
list. A new axis needs one entry here, and the code that uses it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache, lru_cache
from itertools import product
from math import prod


class Divided(StrEnum):
    """What the ranks along an axis divide among themselves."""

    ITEMS = "items"
    """The records of a batch."""
    TOKENS = "tokens"
    """The tokens of a micro-batch."""
    EXPERTS = "experts"
    """Whole experts of a mixture's layers."""
    MATRICES = "matrices"
    """Heads, feed-forward units and vocabulary: the tensors that have a partition."""
    LAYERS = "layers"
    """Decoder layers: the ranks are pipeline stages."""
    TURNS = "turns"
    """Nothing among ranks: a stage computes its layers in several turns, its virtual stages. So no mesh has a
    degree above 1 on this axis. It only names the number of turns in files and tables."""


COPIES = (Divided.ITEMS, Divided.TOKENS)
"""What ranks with the same parameters divide. ZeRO shards optimizer state, gradients or parameters over these
ranks."""


@dataclass(frozen=True, eq=False)  # equal only to itself: the search looks axes up millions of times
class Axis:
    """Axis of a mesh. Ranks along an axis that divides nothing hold and compute the same."""

    name: str
    """Name in plan files."""
    letter: str
    """Name in the text form of placements."""
    title: str
    divides: Divided | None
    nesting: int
    """Order in which coordinates number the ranks: the axis with the highest number changes fastest.

    Ranks that exchange the most data are neighbours. Stages are outermost, and ranks that share matrices are
    innermost. Ranks with the same parameters follow one another; the planner relies on this order."""
    always_written: bool = False
    """Whether text forms and files name the axis even if its degree is 1."""


AXES: tuple[Axis, ...] = (
    Axis("dp", "d", "data parallelism", Divided.ITEMS, nesting=20, always_written=True),
    Axis("cp", "c", "context parallelism", Divided.TOKENS, nesting=25),
    Axis("tp", "t", "tensor parallelism", Divided.MATRICES, nesting=30, always_written=True),
    Axis("pp", "p", "pipeline parallelism", Divided.LAYERS, nesting=10, always_written=True),
    Axis("vpp", "v", "virtual pipeline stages", Divided.TURNS, nesting=50),
    Axis("ep", "e", "expert parallelism", Divided.EXPERTS, nesting=40),
)
"""All axes, in the order in which people read them."""


def axis_names() -> tuple[str, ...]:
    """Name all axes, in the order in which people read them."""
    return tuple(_columns(AXES))


def axes_dividing(*divided: Divided | None) -> tuple[str, ...]:
    """Name the axes whose ranks divide anything in `divided`, outermost first. None stands for axes that divide
    nothing."""
    return _names_dividing(AXES, divided)


@cache
def _names_dividing(axes: tuple[Axis, ...], divided: tuple[Divided | None, ...]) -> tuple[str, ...]:
    return tuple(axis.name for axis in _outermost_first(axes) if axis.divides in divided)


@cache
def _outermost_first(axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
    return tuple(sorted(axes, key=lambda axis: axis.nesting))


@cache
def _columns(axes: tuple[Axis, ...]) -> Mapping[str, int]:
    return {axis.name: column for column, axis in enumerate(axes)}


def column_of(axis: str) -> int:
    """Find the place of an axis in `Degrees.values`. Raises KeyError if there is no such axis."""
    return _columns(AXES)[axis]


@dataclass(frozen=True, order=True, slots=True)
class Degrees:
    """Number of ranks along each axis, and so the shape of a mesh.

    A position is the place of a rank in the mesh, counted from 0. Coordinates that are not given are 0.
    """

    values: tuple[int, ...]
    """Degrees in the order of `AXES`."""

    @classmethod
    def of(cls, degrees: Mapping[str, int]) -> "Degrees":
        """Make degrees from numbers by axis name; axes that are not named get 1. Raises KeyError for a name that is
        not an axis."""
        values = [1] * len(AXES)
        for axis, degree in degrees.items():
            values[column_of(axis)] = degree
        return cls(tuple(values))

    def __getitem__(self, axis: str) -> int:
        return self.values[_columns(AXES)[axis]]

    @property
    def size(self) -> int:
        """Number of ranks."""
        return prod(self.values)

    @property
    def copies(self) -> int:
        """Number of ranks that compute with the same parameters."""
        return self.count(*axes_dividing(*COPIES))

    def changed(self, degrees: Mapping[str, int]) -> "Degrees":
        """Copy with other degrees on some axes. Raises KeyError for a name that is not an axis."""
        return Degrees.of({**self.named(), **degrees})

    def named(self) -> dict[str, int]:
        """Degrees by axis name, as in files and tables: axes that are always written, and axes with a degree above
        1."""
        return {
            axis.name: degree
            for axis, degree in zip(AXES, self.values, strict=True)
            if axis.always_written or degree > 1
        }

    def count(self, *axes: str) -> int:
        """Count the ranks of a group along these axes."""
        return prod(self[axis] for axis in axes)

    def index(self, position: int, *axes: str) -> int:
        """Find the index of a position within its group along these axes, in the order of `offsets`."""
        strides = _strides(AXES, self.values)
        index = 0
        for axis in axes:
            degree, stride = strides[axis]
            index = index * degree + position // stride % degree
        return index

    def position(self, coordinates: Mapping[str, int]) -> int:
        """Find the position at some coordinates."""
        strides = _strides(AXES, self.values)
        return sum(index * strides[axis][1] for axis, index in coordinates.items())

    def stride(self, axis: str) -> int:
        """Difference of the positions of neighbours along an axis."""
        return _strides(AXES, self.values)[axis][1]

    def offsets(self, *axes: str) -> tuple[int, ...]:
        """List the positions of the group that contains position 0 along these axes; the last axis changes
        fastest."""
        return _offsets(AXES, self.values, axes)

    def origins(self, *axes: str) -> tuple[int, ...]:
        """List the first position of each group along these axes, ascending."""
        others = (axis.name for axis in _outermost_first(AXES) if axis.name not in axes)
        return _offsets(AXES, self.values, tuple(others))

    def in_table(self) -> str:
        """Format the degrees as tables show them in the column `degrees_title`: `2×8×4`."""
        always = [f"{self[axis.name]}" for axis in AXES if axis.always_written]
        others = [axis.name for axis in AXES if not axis.always_written and self[axis.name] > 1]
        return " ".join(["×".join(always), *(f"{name}={self[name]}" for name in others)])

    def __str__(self) -> str:
        """Format the degrees as in the text form of placements: `d2 t1 p1`."""
        return " ".join(
            f"{axis.letter}{degree}"
            for axis, degree in zip(AXES, self.values, strict=True)
            if axis.always_written or degree > 1
        )


@cache
def _strides(axes: tuple[Axis, ...], values: tuple[int, ...]) -> Mapping[str, tuple[int, int]]:
    """Find the degree and the stride of each axis."""
    columns, stride, found = _columns(axes), 1, {}
    for axis in reversed(_outermost_first(axes)):
        degree = values[columns[axis.name]]
        found[axis.name] = (degree, stride)
        stride *= degree
    return found


@lru_cache(maxsize=512)
def _offsets(axes: tuple[Axis, ...], values: tuple[int, ...], names: tuple[str, ...]) -> tuple[int, ...]:
    strides = _strides(axes, values)
    lines = [[i * stride for i in range(degree)] for degree, stride in (strides[name] for name in names)]
    return tuple(map(sum, product(*lines)))


def degrees_title() -> str:
    """Make the title of a table's column of degrees: `dp×tp×pp`."""
    return "×".join(axis.name for axis in AXES if axis.always_written)


def degrees_pattern() -> str:
    """Make a regular expression for the text form of degrees and the space after it; each axis is a named group."""
    return "".join(
        rf"(?:{axis.letter}(?P<{axis.name}>\d+) ){'' if axis.always_written else '?'}" for axis in AXES
    )


def list_degrees(size: int, allowed: Mapping[str, Sequence[int]], rest: str) -> Iterator[Degrees]:
    """Enumerate the degrees of a mesh of `size` ranks. An axis in `allowed` gets one of its allowed degrees; the
    axis `rest` gets the remaining factor of `size`.

    Axes that are not named have degree 1.
    """

    def choose(names: Sequence[str], left: int, chosen: dict[str, int]) -> Iterator[Degrees]:
        if not names:
            yield Degrees.of({**chosen, rest: left})
            return
        for degree in allowed[names[0]]:
            if left % degree == 0:
                yield from choose(names[1:], left // degree, {**chosen, names[0]: degree})

    yield from choose([*allowed], size, {})
