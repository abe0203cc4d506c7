"""Seconds of training and inference: whole sequences, once or several times through the model."""

from collections.abc import Mapping
from dataclasses import dataclass

from realrl.layout.limits import bucket_count
from realrl.planner.cost.call_context import CallContext
from realrl.planner.cost.timing import DeviceHostTime
from realrl.planner.workload.batching import Chunks, split_work

_SMALL = 64
"""Bytes of the sums of figures, of which ranks wait for a few in every optimizer step."""


@dataclass(frozen=True)
class OutsideLayers:
    """Seconds of one chunk outside the layers: on every stage, on the first and on the last one, and what
    tensor ranks tell each other on the first and on the last one."""

    every: float = 0.0
    first: float = 0.0
    last: float = 0.0
    comm_first: float = 0.0
    comm_last: float = 0.0

    def own(self, stages: int) -> list[float]:
        """What each stage computes."""
        return _by_stage(stages, self.every, self.first, self.last)

    def communication(self, stages: int) -> list[float]:
        """What its tensor ranks tell each other."""
        return _by_stage(stages, 0.0, self.comm_first, self.comm_last)


def _by_stage(stages: int, every: float, first: float, last: float) -> list[float]:
    found = [every] * stages
    found[0] += first
    found[-1] += last
    return found


def cost_training(context: CallContext) -> Mapping[str, float]:
    """Terms of all optimizer steps of a train call, under the 1F1B schedule."""
    timing, strategy, work = context.timing, context.strategy, context.work
    chunks = split_work(work, strategy, timing.efficiency.pass_chunks_per_stage)
    size = context.size(chunks)
    forward, backward = timing.forward(size), timing.backward(size)
    layer_communication = context.layer_communication(chunks.tokens)
    rounds = 3 if strategy.recompute else 2
    device = backward.device + forward.device * (rounds - 1)
    host = backward.host + forward.host * (rounds - 1)
    layer = DeviceHostTime(device, host + rounds * layer_communication.host)
    outside = OutsideLayers(
        timing.enter(size),
        timing.enter_backward(size),
        timing.head(size) + timing.head_backward(size),
        layer_communication.device / 2,
        context.head_communication(chunks.tokens) + context.head_backward_communication(chunks.tokens),
    )
    terms = _cost_pipeline(context, chunks, layer, rounds * layer_communication.device, outside)
    if strategy.pp > 1:
        # Forward waits for backward of the next stage and the other way round, so that nothing hides transfers.
        terms["pipeline"] = 2 * (chunks.count + strategy.pp - 1) * context.hop(chunks.tokens)
        terms["pipeline"] += 2 * context.network.hop(_SMALL)
    elements = max(timing.sizes.stage_elements(strategy.pp))
    update = timing.update(elements, strategy.dp)
    terms["optimizer"] = update + context.network.mesh_group.all_reduce(_SMALL)
    last_pass = context.layers[-1] * backward.device
    terms["data"] = _cost_gradient_reduction(context, elements, last_pass) + _cost_parameter_gather(
        context, elements, update
    )
    steps = work.minibatches * work.passes
    total = {name: seconds * steps for name, seconds in terms.items()}
    total["compute"] += timing.prepare(work.sequences / strategy.dp, work.episode)
    return total


def _cost_gradient_reduction(context: CallContext, elements: int, last_pass: float) -> float:
    """Adding float32 gradients up: while the last micro-batch goes backward, but for the last bucket.

    Parameters of which tensor ranks or stages each have a part of the gradient must be completed before.
    """
    network, parts = context.network, bucket_count(elements)
    seconds = parts * network.dp_group.reduce_scatter(4 * elements / parts)
    small = 3 * network.dp_group.all_reduce(_SMALL)
    completion = _cost_partial_gradients(context)
    if completion:
        return small + completion + seconds
    return small + max(seconds - last_pass * context.overlap, seconds / parts)


def _cost_partial_gradients(context: CallContext) -> float:
    """Adding up gradients of what several ranks hold but each computed only a part of."""
    sizes, network, shape = context.timing.sizes, context.network, context.timing.sizes.shape
    seconds = 0.0
    if context.strategy.sequence_parallel:
        seconds += 2 * max(context.layers) * network.tp_group.all_reduce(4 * shape.hidden_size)
    if sizes.shares_kv_heads:
        keys = 4 * shape.kv_heads * shape.head_dim * shape.hidden_size
        seconds += 2 * max(context.layers) * network.tp_group.all_reduce(keys)
    if shape.tied_embeddings and sizes.head == "lm" and context.strategy.pp > 1:
        seconds += network.embedding_group.all_reduce(4 * sizes.padded_vocab * shape.hidden_size)
    return seconds


def _cost_parameter_gather(context: CallContext, elements: int, update: float) -> float:
    """Collecting parameters: while the next bucket is updated."""
    parts = bucket_count(elements)
    seconds = parts * context.network.dp_group.all_gather(context.timing.element_bytes * elements / parts)
    return max(seconds - update * context.overlap, seconds / parts)


def cost_inference(context: CallContext) -> Mapping[str, float]:
    """Terms of an inference call."""
    timing, strategy = context.timing, context.strategy
    chunks = split_work(context.work, strategy, timing.efficiency.pass_chunks_per_stage)
    size = context.size(chunks)
    outside = OutsideLayers(
        timing.enter(size),
        last=timing.head(size),
        comm_first=context.layer_communication(chunks.tokens).device / 2,
        comm_last=context.head_communication(chunks.tokens),
    )
    return cost_forward_pass(context, chunks, timing.forward(size), outside)


def cost_forward_pass(
    context: CallContext, chunks: Chunks, layer: DeviceHostTime, outside: OutsideLayers
) -> dict[str, float]:
    """Terms of chunks that go through all stages once."""
    layer_communication = context.layer_communication(chunks.tokens)
    layer = DeviceHostTime(layer.device, layer.host + layer_communication.host)
    terms = _cost_pipeline(context, chunks, layer, layer_communication.device, outside)
    # Sends do not wait, and a stage works on the next chunk meanwhile.
    terms["pipeline"] = (context.strategy.pp - 1) * context.hop(chunks.tokens)
    return terms


def _cost_pipeline(
    context: CallContext,
    chunks: Chunks,
    layer: DeviceHostTime,
    layer_communication: float,
    outside: OutsideLayers,
) -> dict[str, float]:
    """Terms of the busiest stage, and how long it waits while others start or end alone.

    A pipeline takes one chunk through all stages and all other chunks through the slowest one.
    """
    wait = max(0.0, layer.host - layer.device - layer_communication)
    each = layer.device + layer_communication + wait
    own, communication = outside.own(context.strategy.pp), outside.communication(context.strategy.pp)
    stages = [n * each + a + b for n, a, b in zip(context.layers, own, communication, strict=True)]
    slowest = stages.index(max(stages))
    layers = context.layers[slowest]
    return {
        "compute": chunks.count * (layers * layer.device + own[slowest]),
        "tensor": chunks.count * (layers * layer_communication + communication[slowest]),
        "launch": chunks.count * layers * wait,
        "bubble": sum(stages) - stages[slowest],
    }
