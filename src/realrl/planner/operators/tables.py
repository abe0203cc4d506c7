"""Measured seconds of operators, by device kind: products, attention and collectives, interpolated between sizes.

The tables of `measured/` are distilled by `tools/operator_tables.py` from measurements that NVIDIA publishes in the
package aiconfigurator-core (Apache-2.0): of products by torch.nn.functional.linear, attention by the kernels of
vLLM (FlashAttention 2 on A100 and L40S, 3 on H100 and H200, FlashInfer on B200), and collectives of NCCL inside a
node, all in bfloat16.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib.resources import files
from math import prod
from typing import Any, Literal, Self

import numpy as np

from realrl.plan.placement import Dtype
from realrl.planner.cluster.devices import DeviceKind
from realrl.planner.cluster.efficiency import Efficiency
from realrl.program.arrays import Floats, Ints, Real

PERCENT = 100
"""Files have values in steps of 1/100."""


@dataclass(frozen=True)
class Grid:
    """A function of sizes, linear in the logarithm of each between neighbouring points, constant beyond the last.

    `axes`: the sizes of the points, ascending, axis by axis; `values`: those of all points, the last axis varying
    fastest.
    """

    axes: tuple[tuple[float, ...], ...]
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.values) != prod(map(len, self.axes)):
            raise ValueError(f"{len(self.values)} values for a grid of {[len(axis) for axis in self.axes]}")

    def at(self, *sizes: Real) -> Floats:
        """Interpolate the values at one size, or array of sizes, per axis."""
        return np.asarray(sum(weight * self._table[point] for point, weight in self.weights(sizes)))

    def weights(self, sizes: Sequence[Real]) -> list[tuple[Ints, Floats]]:
        """List the points whose values are averaged at some sizes, as indices in `values`, with their weights."""
        found = [(np.zeros((), dtype=np.int64), np.ones(()))]
        for axis, size in zip(self._axes, sizes, strict=True):
            last = len(axis) - 1
            after = np.searchsorted(axis, size, side="right")
            begin, end = np.maximum(after - 1, 0), np.minimum(after, last)
            inside = np.minimum(np.maximum(size, axis[0]), axis[-1])
            whole = np.log2(axis[end] / axis[begin])
            share = np.log2(inside / axis[begin]) / np.where(begin < end, whole, 1.0)
            near = [(begin, 1 - share), (end, share)]
            found = [(point * len(axis) + i, weight * part) for point, weight in found for i, part in near]
        return found

    @cached_property
    def _axes(self) -> tuple[Floats, ...]:
        return tuple(np.array(axis, dtype=np.float64) for axis in self.axes)

    @cached_property
    def _table(self) -> Floats:
        return np.array(self.values, dtype=np.float64)

    @classmethod
    def read(cls, stored: dict[str, Any]) -> Self:
        """Build a grid from what `write` has returned."""
        axes = tuple(tuple(map(float, axis)) for axis in stored["axes"])
        return cls(axes, tuple(value / PERCENT for value in stored["percent"]))

    def write(self) -> dict[str, Any]:
        """Return what JSON can store, values rounded to hundredths."""
        return {
            "axes": [[int(size) for size in axis] for axis in self.axes],
            "percent": [round(PERCENT * value) for value in self.values],
        }


ELEMENT = 2
"""Bytes per element of operands: they are bfloat16."""
LEAST_S = Efficiency.least_kernel_s
TILE = 128
"""Keys that a block of an attention kernel reads at a time, even if a window hides most of them."""


@dataclass(frozen=True)
class TablePoint:
    """Place of an operator in its table, and the seconds that the table's answer is relative to."""

    bound: Real
    """Seconds."""
    sizes: tuple[Real, ...]
    """One for each axis of the table."""


def place_product(device: DeviceKind, rows: Real, outputs: Real, inputs: Real) -> TablePoint:
    """Place a product of [rows, inputs] and [inputs, outputs]."""
    elements = rows * inputs + inputs * outputs + rows * outputs
    return TablePoint(_bound(device, 2 * rows * outputs * inputs, elements), (rows, outputs, inputs))


def place_prefill(
    device: DeviceKind,
    tokens: Real,
    squares: Real,
    heads: Real,
    kv_heads: Real,
    head_dim: Real,
    window: Real | None = None,
) -> TablePoint:
    """Place causal attention of sequences, as if they were of equal length. `squares`: sum of squared lengths.

    Half of the scores are computed, and their product with values. With a window, the same tokens count as shorter
    sequences whose length is the number of tokens that a token sees.
    """
    length = squares / tokens
    seen = length if window is None else np.minimum(length, window + TILE)
    visible = squares * (1 - (1 - seen / length) ** 2)
    bound = _bound(device, 2 * visible * heads * head_dim, 2 * tokens * (heads + kv_heads) * head_dim)
    return TablePoint(bound, (seen, tokens / seen * heads, heads / kv_heads, head_dim))


def place_decode(
    device: DeviceKind,
    rows: Real,
    context: Real,
    heads: Real,
    kv_heads: Real,
    head_dim: Real,
    window: Real | None = None,
) -> TablePoint:
    """Place attention of one new token per row, which reads keys and values of `context` tokens."""
    seen = context if window is None else np.minimum(context, window + TILE)
    bound = _bound(device, 4 * rows * seen * heads * head_dim, 2 * rows * seen * kv_heads * head_dim)
    return TablePoint(bound, (seen, rows * kv_heads, heads / kv_heads, head_dim))


def place_collective(device: DeviceKind, rounds: int, ranks: Real, number_bytes: Real) -> TablePoint:
    """Place a ring collective in a node: `rounds` times, each rank sends all parts of `number_bytes` but one."""
    share = (ranks - 1) / ranks
    return TablePoint(
        LEAST_S + rounds * share * number_bytes / device.link_bytes_per_s, (ranks, number_bytes)
    )


def _bound(device: DeviceKind, operations: Real, elements: Real) -> Real:
    """Seconds of arithmetic or of traffic, whichever is longer, and of a kernel that does nothing."""
    return LEAST_S + np.maximum(
        operations / device.bf16_flops, ELEMENT * elements / device.memory_bytes_per_s
    )


Reduction = Literal["all_reduce", "all_gather", "reduce_scatter"]
"""Collectives that have tables."""

ROUNDS: dict[Reduction, int] = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
"""How many times a ring passes all parts on."""
TABULATED: Dtype = "bfloat16"
"""Type of the operands of all operators in the tables."""
FLASH3 = frozenset({"h100", "h200"})
"""Tables that were measured with FlashAttention 3."""
MOST_RANKS = 8
"""Largest group that has been measured."""


@dataclass(frozen=True)
class Operators:
    """Seconds of operators on a device: a bound by its peaks, times a measured ratio from the tables of its kind.

    Sizes are numbers or arrays. No result is less than `LEAST_S`, even outside of the tables.
    """

    device: DeviceKind
    grids: Mapping[str, Grid]

    def product(self, *sizes: Real) -> Floats:
        """Time a matrix product; for the sizes see `place_product`."""
        return self._time("product", place_product(self.device, *sizes))

    @property
    def flash3(self) -> bool:
        """Whether attention was measured with FlashAttention 3."""
        return self.device.measured in FLASH3

    def prefill(self, *sizes: Real) -> Floats:
        """Time causal attention of whole sequences; for the sizes see `place_prefill`."""
        return self._time("prefill", place_prefill(self.device, *sizes))

    def decode(self, *sizes: Real) -> Floats:
        """Time attention of one new token per sequence; for the sizes see `place_decode`."""
        return self._time("decode", place_decode(self.device, *sizes))

    def collective(self, kind: Reduction, ranks: Real, number_bytes: Real) -> Floats:
        """Time a collective of 2 to `MOST_RANKS` ranks of a node.

        `number_bytes`: of the result of an all-gather, of the input of the others.
        """
        return self._time(kind, place_collective(self.device, ROUNDS[kind], ranks, number_bytes))

    def _time(self, table: str, point: TablePoint) -> Floats:
        return np.maximum(LEAST_S, point.bound * np.exp(self.grids[table].at(*point.sizes)))


@lru_cache
def find_operators(device: DeviceKind) -> Operators | None:
    """Read the tables of a device's kind; None if it has none."""
    if device.measured is None:
        return None
    grids = read_tables(device.measured)["grids"]
    return Operators(device, {name: Grid.read(stored) for name, stored in grids.items()})


def read_tables(name: str) -> dict[str, Any]:
    """Read a file of tables: a description of the measurements (`source`), and the `grids` by name."""
    path = files("realrl.planner.operators.measured") / f"{name}.json"
    tables: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return tables
