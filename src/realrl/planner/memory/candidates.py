"""Memory of the candidates that a call is given for all its sequences, or gives."""

from realrl.dataflow.call import Call, Kind
from realrl.planner.arrays.arrays import Bools, Ints, Real, truncate
from realrl.planner.memory.activations import Parts, choose, total
from realrl.planner.workload.workload import CallWork

_BYTES = 8
"""Bytes per candidate: its id in int32, and a log-probability in float32."""


def add_candidates(
    parts: Parts, call: Call, work: CallWork, rank_records: Ints, tokens: Real, *, cpu: bool, last: Bools
) -> Parts:
    """Add what a stage holds of a call's candidates to its peak; `tokens` are those of a micro-batch,
    `rank_records` the records of a rank.

    Given ones are copied for a micro-batch and, in training, for the mini-batch, and before that for the whole step
    where the device has memory of its own. Those that inference gives stay in the memory of a CPU.
    """
    if call.candidates is None:
        return parts
    rank_tokens = rank_records * work.mean
    each = _BYTES * call.candidates.count
    if call.candidates.ids is None:
        # The outputs of all micro-batches are put together at last.
        outputs = {"activations": truncate(2 * each * rank_tokens)}
        return choose(last & (total(outputs) > total(parts)), outputs, parts) if cpu else parts
    if call.kind is Kind.TRAIN:
        tokens = tokens + rank_tokens * (1 if cpu else 1 + work.minibatches)
    return {**parts, "activations": parts.get("activations", truncate(0)) + truncate(each * tokens)}
