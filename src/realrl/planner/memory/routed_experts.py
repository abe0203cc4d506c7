"""Memory of the experts that router replay records in generation, and takes over in training and inference."""

from realrl.dataflow.call import Call
from realrl.families.shape import ModelShape
from realrl.planner.memory.activations import Parts
from realrl.planner.workload.workload import CallWork
from realrl.program.arrays import Ints, Real, truncate

_BYTES = 2
"""Bytes of the number of an expert."""


def add_routed_experts(
    parts: Parts,
    call: Call,
    shape: ModelShape,
    work: CallWork,
    rank_records: Ints,
    tokens: Real,
    *,
    layers: Ints,
    cpu: bool,
) -> Parts:
    """Add what a stage of `layers` holds of them to the peak of a call.

    `tokens` are those of the cache where the call generates, which has a record beside keys and values, else of a
    micro-batch, `rank_records` the records of
    a rank. Host memory, that of the device on a CPU, has those of all items: of the step, and of the call.
    """
    if shape.mixture is None or not (call.records_experts or any(call.replays)):
        return parts
    each = _BYTES * shape.mixture.per_token
    if call.records_experts:
        return {**parts, "cache": parts.get("cache", truncate(0)) + truncate(each * layers * tokens)}
    held = each * layers * tokens
    if cpu:
        held = held + 2 * each * shape.layers * rank_records * work.minibatches * work.mean
    return {**parts, "activations": parts.get("activations", truncate(0)) + truncate(held)}
