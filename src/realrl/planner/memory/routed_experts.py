"""Memory of router replay: generation records each token's experts, and training and inference reuse them."""

from realrl.dataflow.call import Call
from realrl.families.shape import ModelShape
from realrl.planner.memory.activations import Parts
from realrl.planner.workload.workload import CallWork
from realrl.program.arrays import Ints, Real, truncate

_BYTES = 2
"""Bytes of an expert's number, an int16."""


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
    """Add the memory of recorded experts to the peak of a call, for a stage with `layers` layers.

    For a generate call, `tokens` counts the tokens of the KV cache, which also holds the recorded experts. For
    other calls it counts the tokens of a micro-batch. `rank_records` counts the records of a mini-batch on a rank.
    Host memory holds the experts of all items twice, for the step and for the call; on a CPU this is device memory.
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
