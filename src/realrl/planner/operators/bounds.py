"""Seconds that operators cannot fall below, by arithmetic and traffic: what measured seconds are divided by.

Their ratio varies slowly with sizes, so that it can be interpolated, and carries over to devices with other peaks.
All operands have two bytes per element. A kernel that does nothing takes `LEAST_S`.
"""

from realrl.planner.cluster.devices import DeviceKind

ELEMENT = 2
"""Bytes per element of operands: they are bfloat16."""
LEAST_S = 2e-6
"""Seconds from the start of a kernel to the start of the next one, without any work: products of 32 x 32 x 32 take
2.5 µs on an H100 and 4 µs on an A100, in a CUDA graph."""
TILE = 128
"""Keys that a block of an attention kernel reads at a time, also where a window hides most of them."""


def bound_product(device: DeviceKind, rows: float, outputs: float, inputs: float) -> float:
    """Bound a product of [rows, inputs] and [inputs, outputs]."""
    arithmetic = 2 * rows * outputs * inputs / device.bf16_flops
    elements = rows * inputs + inputs * outputs + rows * outputs
    return LEAST_S + max(arithmetic, ELEMENT * elements / device.memory_bytes_per_s)


def bound_prefill(
    device: DeviceKind, tokens: float, squares: float, heads: float, kv_heads: float, head_dim: float
) -> float:
    """Bound causal attention of whole sequences: half of the scores, and their product with values.

    `squares`: sum of squared sequence lengths.
    """
    arithmetic = 2 * squares * heads * head_dim / device.bf16_flops
    elements = 2 * tokens * (heads + kv_heads) * head_dim
    return LEAST_S + max(arithmetic, ELEMENT * elements / device.memory_bytes_per_s)


def bound_decode(
    device: DeviceKind, rows: float, context: float, heads: float, kv_heads: float, head_dim: float
) -> float:
    """Bound attention of one new token per row, which reads keys and values of `context` tokens."""
    arithmetic = 4 * rows * context * heads * head_dim / device.bf16_flops
    elements = 2 * rows * context * kv_heads * head_dim
    return LEAST_S + max(arithmetic, ELEMENT * elements / device.memory_bytes_per_s)


def bound_collective(device: DeviceKind, rounds: int, ranks: float, number_bytes: float) -> float:
    """Bound a ring collective in a node: `rounds` times, each rank sends all parts of `number_bytes` but one."""
    share = (ranks - 1) / ranks
    return LEAST_S + rounds * share * number_bytes / device.link_bytes_per_s
