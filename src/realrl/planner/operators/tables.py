"""Measured seconds of operators, by device kind: products, attention and collectives, interpolated between sizes.

`tools/operator_tables.py` makes the tables in `measured/` from measurements that NVIDIA publishes in the package
aiconfigurator-core (Apache-2.0). They cover products by torch.nn.functional.linear, attention, and NCCL collectives
inside a node, all in bfloat16. Attention was measured with the kernels of vLLM: FlashAttention 2 on A100 and L40S,
FlashAttention 3 on H100 and H200, and FlashInfer on B200.
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
    """Function of several sizes, tabulated at grid points. Between neighbouring points, it is linear in the
    logarithm of each size. Beyond the outermost points, it is constant.

    `axes`: the sizes of the grid points along each axis, ascending. `values`: the values at all grid points, with
    the last axis varying fastest.
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
        """List the grid points whose values are averaged at `sizes`. Each is an index in `values` with its
        weight."""
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
        """Build a grid from the result of `write`."""
        axes = tuple(tuple(map(float, axis)) for axis in stored["axes"])
        return cls(axes, tuple(value / PERCENT for value in stored["percent"]))

    def write(self) -> dict[str, Any]:
        """Return the grid in a form that JSON can store, with values rounded to hundredths."""
        return {
            "axes": [[int(size) for size in axis] for axis in self.axes],
            "percent": [round(PERCENT * value) for value in self.values],
        }


ELEMENT = 2
"""Bytes per element of operands, which are bfloat16."""
LEAST_S = Efficiency.least_kernel_s
TILE = 128
"""Keys that a block of an attention kernel reads at a time, even if a window hides most of them."""


@dataclass(frozen=True)
class TablePoint:
    """Position of an operator in its table, and a lower bound on its seconds. The table holds ratios to this
    bound."""

    bound: Real
    """Lower bound on the operator's seconds, from the device's peak performance."""
    sizes: tuple[Real, ...]
    """Position along each axis of the table."""


def place_product(device: DeviceKind, rows: Real, outputs: Real, inputs: Real) -> TablePoint:
    """Find the table point of a product of [rows, inputs] and [inputs, outputs]."""
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
    """Find the table point of causal attention over sequences, as if they had equal lengths. `squares`: sum of
    squared lengths.

    The kernel computes only the unmasked half of the scores, and of their product with values. With a window, the
    tokens count as shorter sequences. Their length is the number of tokens that the last token sees.
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
    """Find the table point of attention of one new token per row, which reads keys and values of `context`
    tokens."""
    seen = context if window is None else np.minimum(context, window + TILE)
    bound = _bound(device, 4 * rows * seen * heads * head_dim, 2 * rows * seen * kv_heads * head_dim)
    return TablePoint(bound, (seen, rows * kv_heads, heads / kv_heads, head_dim))


def place_collective(device: DeviceKind, rounds: int, ranks: Real, number_bytes: Real) -> TablePoint:
    """Find the table point of a ring collective in a node. In each of `rounds` rounds, a rank sends all parts of
    `number_bytes` except one."""
    share = (ranks - 1) / ranks
    return TablePoint(
        LEAST_S + rounds * share * number_bytes / device.link_bytes_per_s, (ranks, number_bytes)
    )


def _bound(device: DeviceKind, operations: Real, elements: Real) -> Real:
    """Bound the seconds from below: arithmetic or memory traffic, whichever takes longer, plus an empty kernel."""
    return LEAST_S + np.maximum(
        operations / device.bf16_flops, ELEMENT * elements / device.memory_bytes_per_s
    )


Reduction = Literal["all_reduce", "all_gather", "reduce_scatter"]
"""Collectives that have tables."""

ROUNDS: dict[Reduction, int] = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
"""Number of rounds of each collective. In a round, all parts travel along the ring once."""
TABULATED: Dtype = "bfloat16"
"""Type of the operands of all operators in the tables."""
FLASH3 = frozenset({"h100", "h200"})
"""Tables that were measured with FlashAttention 3."""
MOST_RANKS = 8
"""Number of ranks of the largest group that was measured."""


@dataclass(frozen=True)
class Operators:
    """Predicts the seconds of operators on a device: a bound from its peak performance, times a ratio from its
    kind's tables.

    Sizes are numbers or arrays. No result is less than `LEAST_S`, even outside of the tables.
    """

    device: DeviceKind
    grids: Mapping[str, Grid]

    def product(self, *sizes: Real) -> Floats:
        """Predict the seconds of a matrix product. `sizes`: those of `place_product`."""
        return self._time("product", place_product(self.device, *sizes))

    @property
    def flash3(self) -> bool:
        """Whether attention was measured with FlashAttention 3."""
        return self.device.measured in FLASH3

    def prefill(self, *sizes: Real) -> Floats:
        """Predict the seconds of causal attention over whole sequences. `sizes`: those of `place_prefill`."""
        return self._time("prefill", place_prefill(self.device, *sizes))

    def decode(self, *sizes: Real) -> Floats:
        """Predict the seconds of attention of one new token per sequence. `sizes`: those of `place_decode`."""
        return self._time("decode", place_decode(self.device, *sizes))

    def collective(self, kind: Reduction, ranks: Real, number_bytes: Real) -> Floats:
        """Predict the seconds of a collective of 2 to `MOST_RANKS` ranks of a node.

        `number_bytes`: size of the result of an all-gather, or of the input of another collective.
        """
        return self._time(kind, place_collective(self.device, ROUNDS[kind], ranks, number_bytes))

    def _time(self, table: str, point: TablePoint) -> Floats:
        return np.maximum(LEAST_S, point.bound * np.exp(self.grids[table].at(*point.sizes)))


@lru_cache
def find_operators(device: DeviceKind) -> Operators | None:
    """Read the operator tables of a device's kind. Returns None if there are none."""
    if device.measured is None:
        return None
    grids = read_tables(device.measured)["grids"]
    return Operators(device, {name: Grid.read(stored) for name, stored in grids.items()})


def read_tables(name: str) -> dict[str, Any]:
    """Read a file of tables: a description of the measurements (`source`), and the `grids` by name."""
    path = files("realrl.planner.operators.measured") / f"{name}.json"
    tables: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return tables
