"""Time model of train and inference calls."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from realrl.layout.limits import GATHER_STAGES, bucket_count
from realrl.planner.cost.call_context import CallContext
from realrl.planner.cost.sharded import SectionSeconds, ShardedTraffic
from realrl.planner.cost.timing import BatchSize, DeviceHostTime
from realrl.planner.workload.batching import Chunks, split_work

_SMALL = 64
"""Bytes of the all-reduces of metrics and norms, a few of which every optimizer step waits for."""


@dataclass(frozen=True, kw_only=True)
class OutsideLayers:
    """Seconds of one chunk outside the layers.

    Computation on every stage, the first and the last one, and TP communication on the first and the last one.
    """

    every: float = 0.0
    first: float = 0.0
    last: float = 0.0
    comm_first: float = 0.0
    comm_last: float = 0.0

    def own(self, stages: int) -> list[float]:
        """Return the seconds of computation by stage."""
        return _by_stage(stages, self.every, self.first, self.last)

    def communication(self, stages: int) -> list[float]:
        """Return the seconds of TP communication by stage."""
        return _by_stage(stages, 0.0, self.comm_first, self.comm_last)


def _by_stage(stages: int, every: float, first: float, last: float) -> list[float]:
    seconds = [every] * stages
    seconds[0] += first
    seconds[-1] += last
    return seconds


def cost_training(context: CallContext) -> Mapping[str, float]:
    """Cost all optimizer steps of a train call under the 1F1B schedule, in seconds by term.

    Layers below the first one that is trained have no backward pass; nor have frozen embeddings. Not modelled is
    what else a frozen part spares: the gradient of a tied head's weight, and messages to stages without a backward
    pass.
    """
    timing = context.timing
    strategy = context.strategy
    work = context.work
    chunks = split_work(work, strategy, timing.efficiency.pass_chunks_per_stage)
    size = BatchSize.of(chunks)
    forward = timing.forward(size)
    backward = timing.backward(size)
    layer_communication = context.layer_communication(chunks.tokens)
    rounds = 3 if strategy.recompute else 2
    device = backward.device + forward.device * (rounds - 1)
    host = backward.host + forward.host * (rounds - 1)
    trained = timing.sizes.trained
    updated = trained.stage_layers(strategy.pp)
    frozen = [n - k for n, k in zip(context.layers, updated, strict=True)]
    sharded = ShardedTraffic(context)
    launches = [sharded.host(backward=backward) for backward in (False, True)]
    layers = [
        _EqualLayers(
            counts=updated,
            layer=DeviceHostTime(device, host + rounds * layer_communication.host + sum(launches)),
            communication=rounds * layer_communication.device,
        ),
        _EqualLayers(
            counts=frozen,
            layer=DeviceHostTime(forward.device, forward.host + layer_communication.host + launches[0]),
            communication=layer_communication.device,
        ),
    ]
    outside = OutsideLayers(
        every=timing.embed(size),
        first=timing.embed_backward(size) if any(trained.embedding) else 0.0,
        last=timing.head(size) + timing.head_backward(size),
        comm_first=layer_communication.device / 2,
        comm_last=context.head_communication(chunks.tokens)
        + context.head_backward_communication(chunks.tokens),
    )
    terms = _cost_pipeline(context, chunks, layers, outside)
    if strategy.pp > 1:
        # Under 1F1B forward waits for backward of the next stage and vice versa, so that transfers are exposed.
        terms["pipeline"] = 2 * (chunks.count + strategy.pp - 1) * context.hop(chunks.tokens)
        terms["pipeline"] += 2 * context.network.hop(_SMALL)
    elements = max(trained.stage_elements(strategy.pp))
    update = timing.update(elements, strategy.dp)
    terms["optimizer"] = update + context.network.mesh_group.all_reduce(_SMALL)
    if strategy.zero == 1:
        last_pass = updated[-1] * backward.device
        terms["data"] = _cost_gradient_reduction(context, elements, last_pass)
        terms["data"] += _cost_parameter_gather(context, elements, update)
    else:
        seconds = SectionSeconds(
            layer=forward.device,
            layer_backward=device - forward.device,
            head_backward=timing.head_backward(size),
        )
        terms["data"] = _cost_sharded_steps(context, sharded, chunks.count, updated, seconds)
    steps = work.minibatches * work.passes
    total = {name: seconds * steps for name, seconds in terms.items()}
    if work.episode:
        total["compute"] += timing.prepare_experience(work.sequences / strategy.dp, work.episode)
    return total


def _cost_sharded_steps(
    context: CallContext,
    sharded: ShardedTraffic,
    chunks: float,
    updated: Sequence[int],
    seconds: SectionSeconds,
) -> float:
    """Exposed seconds of data-parallel communication of a mini-batch under ZeRO-2 and ZeRO-3, on the busiest stage.

    Gradients that TP ranks compute in part are summed for every chunk. Ranks agree on the number of chunks.
    """
    stages = [
        chunks * (sharded.forward(stage, seconds) + sharded.backward(stage, layers, seconds))
        + sharded.spread(stage)
        for stage, layers in enumerate(updated)
    ]
    small = (3 + 1) * context.network.dp_group.all_reduce(_SMALL)
    return small + chunks * _cost_partial_gradients(context) + max(stages)


def _cost_gradient_reduction(context: CallContext, elements: int, last_pass: float) -> float:
    """Exposed seconds of gradient reduction.

    It overlaps backward of the last micro-batch, but for the last bucket, and buckets with late gradients: those
    that several TP ranks or stages sum first. Partial gradients of small tensors are summed apart.
    """
    network = context.network
    num_buckets = bucket_count(elements)
    seconds = num_buckets * network.dp_group.reduce_scatter(4 * elements / num_buckets)
    small = 3 * network.dp_group.all_reduce(_SMALL)
    late = seconds * _find_late_share(context, elements)
    early = seconds - late
    exposed = max(early - last_pass * context.overlap, seconds / num_buckets if early else 0.0)
    return small + _cost_partial_gradients(context) + late + exposed


def _find_late_share(context: CallContext, elements: int) -> float:
    """Find the share of the gradients in buckets that start after the backward pass."""
    sizes = context.timing.sizes
    if sizes.shares_kv_heads:
        return 1.0  # heads lie in nearly every bucket
    if sizes.trained.tied and any(sizes.trained.embedding) and context.strategy.pp > 1:
        return min(1.0, sizes.padded_vocab * sizes.shape.hidden_size / elements)
    return 0.0


def _cost_partial_gradients(context: CallContext) -> float:
    """Seconds to sum gradients of replicated parameters of which each rank computed only a part."""
    sizes = context.timing.sizes
    network = context.network
    shape = context.timing.sizes.shape
    most = max(sizes.trained.stage_layers(context.strategy.pp))
    seconds = 0.0
    partial = 4 * most * sizes.partial_elements(sequence_parallel=context.strategy.sequence_parallel)
    if partial:
        seconds += network.tp_group.all_reduce(partial) + network.dp_group.all_reduce(partial)
    if sizes.shares_kv_heads:
        columns = shape.hidden_size if shape.lora is None else shape.lora.rank
        keys = 4 * shape.kv_heads * shape.head_dim * columns
        seconds += 2 * most * network.tp_group.all_reduce(keys)
    if sizes.trained.tied and any(sizes.trained.embedding) and context.strategy.pp > 1:
        seconds += network.embedding_group.all_reduce(4 * sizes.padded_vocab * shape.hidden_size)
    return seconds


def _cost_parameter_gather(context: CallContext, elements: int, update: float) -> float:
    """Exposed seconds of the parameter all-gather: groups of buckets are gathered while the next one is updated."""
    num_buckets = bucket_count(elements)
    bucket_bytes = context.timing.element_bytes * elements / num_buckets
    seconds = num_buckets * context.network.dp_group.all_gather(bucket_bytes)
    last = 1 / min(GATHER_STAGES, num_buckets)
    return max(seconds - update * (1 - last) * context.overlap, seconds * last)


def cost_inference(context: CallContext) -> Mapping[str, float]:
    """Cost an inference call, in seconds by term."""
    timing = context.timing
    strategy = context.strategy
    chunks = split_work(context.work, strategy, timing.efficiency.pass_chunks_per_stage)
    size = BatchSize.of(chunks)
    selects = context.candidates is not None and context.candidates.ids is None
    outside = OutsideLayers(
        every=timing.embed(size),
        last=timing.head(size) + (timing.likeliest(size) if selects else 0.0),
        comm_first=context.layer_communication(chunks.tokens).device / 2,
        comm_last=context.head_communication(chunks.tokens),
    )
    layer = timing.forward(size)
    sharded = ShardedTraffic(context)
    launched = DeviceHostTime(layer.device, layer.host + sharded.host(backward=False))
    terms = cost_forward_pass(context, chunks, launched, outside)
    if strategy.shards_parameters:
        seconds = SectionSeconds(layer=layer.device)
        waits = max(sharded.forward(stage, seconds) for stage in range(strategy.pp))
        terms["data"] = chunks.count * waits + context.network.dp_group.all_reduce(_SMALL)
    return terms


def cost_forward_pass(
    context: CallContext, chunks: Chunks, layer: DeviceHostTime, outside: OutsideLayers
) -> dict[str, float]:
    """Cost the forward pass of all chunks through all stages, in seconds by term."""
    layer_communication = context.layer_communication(chunks.tokens)
    layers = _EqualLayers(
        counts=context.layers,
        layer=DeviceHostTime(layer.device, layer.host + layer_communication.host),
        communication=layer_communication.device,
    )
    terms = _cost_pipeline(context, chunks, [layers], outside)
    # Sends do not wait, and a stage works on the next chunk meanwhile.
    terms["pipeline"] = (context.strategy.pp - 1) * context.hop(chunks.tokens)
    return terms


@dataclass(frozen=True, kw_only=True)
class _EqualLayers:
    """Layers that cost the same."""

    counts: Sequence[int]
    """Such layers on each stage."""
    layer: DeviceHostTime
    """Time of one of them for one chunk."""
    communication: float
    """Seconds of its TP communication."""

    @property
    def wait(self) -> float:
        """Seconds that the device waits for the host."""
        return max(0.0, self.layer.host - self.layer.device - self.communication)

    @property
    def seconds(self) -> float:
        """Seconds of one layer for one chunk."""
        return self.layer.device + self.communication + self.wait


def _cost_pipeline(
    context: CallContext, chunks: Chunks, layers: Sequence[_EqualLayers], outside: OutsideLayers
) -> dict[str, float]:
    """Seconds of the busiest stage by term, and the bubble: its idle time while the pipeline fills and drains.

    A pipeline takes one chunk through all stages and all other chunks through the slowest one.
    """
    pp = context.strategy.pp
    own = outside.own(pp)
    communication = outside.communication(pp)
    stages = [
        sum(one.counts[s] * one.seconds for one in layers) + own[s] + communication[s] for s in range(pp)
    ]
    slowest = stages.index(max(stages))
    counted = [(one.counts[slowest], one) for one in layers]
    return {
        "compute": chunks.count * (sum(n * one.layer.device for n, one in counted) + own[slowest]),
        "tensor": chunks.count * (sum(n * one.communication for n, one in counted) + communication[slowest]),
        "launch": chunks.count * sum(n * one.wait for n, one in counted),
        "bubble": sum(stages) - stages[slowest],
    }
