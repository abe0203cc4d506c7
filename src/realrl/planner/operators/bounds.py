"""Points of tables: bounds of operators by arithmetic and traffic, and the sizes that their seconds depend on.

Measured seconds over a bound vary slowly with sizes, so that the ratio can be interpolated, and it carries over to
devices with other peaks. All operands have two bytes per element.
"""

from dataclasses import dataclass

import numpy as np

from realrl.planner.arrays.arrays import Real
from realrl.planner.cluster.devices import DeviceKind

ELEMENT = 2
"""Bytes per element of operands: they are bfloat16."""
LEAST_S = 2e-6
"""Seconds from the start of a kernel to the start of the next one, without any work: products of 32 x 32 x 32 take
2.5 µs on an H100 and 4 µs on an A100, in a CUDA graph."""
TILE = 128
"""Keys that a block of an attention kernel reads at a time, also where a window hides most of them."""


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
    heads: float,
    kv_heads: float,
    head_dim: float,
    window: int | None = None,
) -> TablePoint:
    """Place causal attention of sequences, as if they were of equal length. `squares`: sum of squared lengths.

    Half of the scores are computed, and their product with values. With a window, length and number are those of as
    many tokens in sequences as long as a token sees.
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
    heads: float,
    kv_heads: float,
    head_dim: float,
    window: int | None = None,
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
