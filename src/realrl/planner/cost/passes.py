"""Time model of train and inference calls."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from realrl.families.sizes import estimate_attention_cost
from realrl.layout.limits import GATHER_STAGES, bucket_count
from realrl.planner.cost.call_context import CallContext
from realrl.planner.cost.network import Ring
from realrl.planner.cost.sharded import SectionSeconds, ShardedTraffic
from realrl.planner.cost.timing import BatchSize, DeviceHostTime
from realrl.planner.workload.batching import Chunks, split_all_work
from realrl.program.arrays import Floats, Ints, Real, apply_each

_SMALL = 64
"""Bytes of an all-reduce of metrics or norms. Every optimizer step waits for a few of them."""


@dataclass(frozen=True, kw_only=True)
class OutsideLayers:
    """Seconds that one chunk (micro-batch) takes outside the layers.

    `every`, `first` and `last`: computation on every stage, on the first stage and on the last stage. `comm_first`
    and `comm_last`: TP communication on the first and on the last stage. `results`: CP communication on the last
    stage.
    """

    every: Real = 0.0
    first: Real = 0.0
    last: Real = 0.0
    comm_first: Real = 0.0
    comm_last: Real = 0.0
    results: Real = 0.0

    def own(self, pp: Ints) -> Floats:
        return _by_stage(pp, self.every, self.first, self.last)

    def communication(self, pp: Ints) -> Floats:
        return _by_stage(pp, 0.0, self.comm_first, self.comm_last)


def _by_stage(pp: Ints, every: Real, first: Real, last: Real) -> Floats:
    """Return seconds by stage, [stages, strategies]. They are 0 past a strategy's last stage."""
    stage = np.arange(pp.max())[:, None]
    return np.where(stage < pp, every, 0.0) + np.where(stage == 0, first, 0.0) + at_last(pp, last)


def at_last(pp: Ints, seconds: Real) -> Floats:
    """Return `seconds` at each strategy's last stage and 0 at all others, [stages, strategies]."""
    return np.where(np.arange(pp.max())[:, None] == pp - 1, seconds, 0.0)


def cost_training(context: CallContext) -> Mapping[str, Floats]:
    """Predict the seconds by term of all optimizer steps of a train call, under the 1F1B schedule, which may be
    interleaved.

    Layers below the first trained layer have no backward pass, and neither have frozen embeddings. The model
    ignores two other savings of a frozen part: the gradient of a tied head's weight, and messages to stages without
    a backward pass.
    """
    timing = context.timing
    strategies = context.strategies
    work = context.work
    chunks = split_all_work(work, strategies, estimate_attention_cost(timing.sizes.shape))
    size = BatchSize.of(chunks, strategies)
    tokens = size.tokens
    trained = timing.sizes.trained
    sharded = ShardedTraffic(context) if strategies.zero > 1 else None
    differentiated = timing.sizes.differentiated_layers
    layers = [
        part for kind in context.kinds for part in _list_trained_layers(kind, chunks, differentiated, sharded)
    ]
    outside = OutsideLayers(
        every=timing.embed(size),
        first=timing.embed_backward(size) if any(trained.embedding) else 0.0,
        last=timing.head(size) + timing.head_backward(size),
        comm_first=context.embedding_communication(tokens),
        comm_last=context.head_communication(tokens) + context.head_backward_communication(tokens),
        results=context.result_communication(tokens, chunks),
    )
    terms, _ = _cost_pipeline(context, chunks, layers, outside)
    # Under 1F1B a stage waits in turn for the stages before and after it, so no computation hides the transfers.
    exposed = strategies.stages.count_waits(chunks.count) * context.hop(tokens)
    exposed += 2 * context.network.hop(_SMALL)
    terms["pipeline"] = np.where(strategies.pp > 1, exposed, 0.0)
    runs = _list_runs(context)
    update = timing.update(
        sum(run.elements for run in runs), sum(run.elements / run.ring.size for run in runs)
    )
    terms["optimizer"] = update + context.network.group("mesh").all_reduce(_SMALL)
    if sharded is None:
        last_pass = sum(
            at_last(strategies.pp, kind.one_kind.count(strategies.stages, within=differentiated)).sum(axis=0)
            * kind.timing.backward(size).device
            for kind in context.kinds
        )
        reduction = _cost_gradient_reduction(context, runs, last_pass)
        terms["data"] = reduction + _cost_parameter_gather(context, runs, update)
    else:
        seconds = SectionSeconds(
            layers=[kind.timing.forward(size).device for kind in context.kinds],
            layers_backward=[_find_backward(kind, size).device for kind in context.kinds],
            head_backward=timing.head_backward(size),
        )
        terms["data"] = _cost_sharded_step(context, sharded, chunks.count, seconds)
    steps = work.minibatches * work.passes
    total = {name: seconds * steps for name, seconds in terms.items()}
    if work.episode:
        total["compute"] += timing.prepare_experience(work.sequences / strategies.dp, work.episode)
    return total


def _find_backward(context: CallContext, size: BatchSize) -> DeviceHostTime:
    """Find the time of a layer's backward pass for one chunk, recomputation included."""
    forward, backward = context.timing.forward(size), context.timing.backward(size)
    again = context.strategies.recompute
    return DeviceHostTime(
        backward.device + np.where(again, forward.device, 0.0),
        backward.host + np.where(again, forward.host, 0.0),
    )


def _list_trained_layers(
    context: CallContext, chunks: Chunks, differentiated: range, sharded: ShardedTraffic | None
) -> "list[_EqualLayers]":
    """List the layers of one kind in training: first the layers among `differentiated`, which have a backward pass,
    then the layers before them, which have none."""
    size = BatchSize.of(chunks, context.strategies)
    forward, backward = context.timing.forward(size), _find_backward(context, size)
    layer_communication = context.layer_communication(size.tokens)
    keys = context.key_communication(size.tokens, chunks)
    experts = context.expert_communication(size.tokens)
    experts_back = context.expert_communication(size.tokens, backward=True)
    communication_host = layer_communication.host + keys.host + experts.host
    rounds = np.where(context.strategies.recompute, 3, 2)
    updated = context.one_kind.count(context.strategies.stages, within=differentiated)
    launches = [0.0, 0.0]
    if sharded is not None:
        launches = [sharded.host(context.one_kind, backward=b) for b in (False, True)]
    return [
        _EqualLayers(
            counts=updated,
            layer=DeviceHostTime(
                forward.device + backward.device,
                forward.host + backward.host + rounds * communication_host + sum(launches),
            ),
            communication=rounds * layer_communication.device,
            keys=rounds * keys.device,
            experts=(rounds - 1) * experts.device + experts_back.device,
            weights=context.timing.weight_gradients(size),
        ),
        _EqualLayers(
            counts=context.counts - updated,
            layer=DeviceHostTime(forward.device, forward.host + communication_host + launches[0]),
            communication=layer_communication.device,
            keys=keys.device,
            experts=experts.device,
        ),
    ]


def _cost_sharded_step(
    context: CallContext, sharded: ShardedTraffic, chunks: Ints, seconds: SectionSeconds
) -> Floats:
    """Exposed seconds of data-parallel communication of a mini-batch under ZeRO-2 and ZeRO-3, on the busiest stage.

    In every chunk, ranks also sum the gradients that each of them has computed only in part. One of the small
    all-reduces lets ranks agree on the number of chunks.
    """
    passes = chunks * (sharded.forward(seconds) + sharded.backward(seconds))
    there = np.arange(len(passes))[:, None] < context.strategies.pp
    stages = np.where(there, passes + sharded.spread(), 0.0)
    small = 4 * context.network.group("copies").all_reduce(_SMALL)
    return small + chunks * _cost_partial_gradients(context) + stages.max(axis=0)


@dataclass(frozen=True)
class _Run:
    """Trained parameters of the busiest stage that the same ranks have copies of. `ring` has these ranks."""

    elements: Ints
    ring: Ring

    @cached_property
    def buckets(self) -> Ints:
        return apply_each(bucket_count, self.elements)

    @property
    def reduction(self) -> Floats:
        """Seconds to reduce the gradients of all buckets."""
        return self.buckets * self.ring.reduce_scatter(4 * self.elements / self.buckets)


def _list_runs(context: CallContext) -> list[_Run]:
    """List the runs of trained parameters on the stage with the most parameters: whole experts have copies on other
    ranks than all other parameters."""
    trained, stages = context.timing.sizes.trained, context.strategies.stages
    others, experts = (stages.tabulate(of) for of in (trained.stage_elements, trained.stage_experts))
    largest = (others + experts).argmax(axis=0), np.arange(others.shape[1])
    runs = [_Run(others[largest], context.network.group("copies"))]
    if context.strategies.ep > 1:
        runs.append(_Run(experts[largest], context.network.group("expert_copies")))
    return runs


def _cost_gradient_reduction(context: CallContext, runs: Sequence[_Run], last_pass: Real) -> Floats:
    """Exposed seconds of gradient reduction.

    The backward pass of the last micro-batch can hide the reduction of all buckets except the last. It cannot hide
    late buckets, whose gradients are first summed over several TP ranks or stages. Partial gradients of small
    tensors are summed separately.
    """
    network = context.network
    small = 3 * network.group("copies").all_reduce(_SMALL)
    others, *experts = runs
    late = others.reduction * _find_late_share(context, others.elements)
    early = others.reduction - late
    first = np.where(early > 0, others.reduction / others.buckets, 0.0)
    for run in experts:
        early = early + run.reduction
        first = first + run.reduction / run.buckets
    exposed = np.maximum(early - last_pass * context.overlap, first)
    return small + _cost_partial_gradients(context) + late + exposed


def _find_late_share(context: CallContext, elements: Ints) -> Real:
    """Find the share of gradients whose reduction can only start after the backward pass."""
    sizes = context.timing.sizes
    if sizes.shares_kv_heads:
        return 1.0  # Nearly every bucket holds some of the shared heads.
    if sizes.trained.tied and any(sizes.trained.embedding):
        share = np.minimum(1.0, sizes.padded_vocab * sizes.shape.hidden_size / elements)
        return np.where(context.strategies.pp > 1, share, 0.0)
    return 0.0


def _cost_partial_gradients(context: CallContext) -> Real:
    """Seconds to sum the gradients of replicated parameters, if each rank has computed a part of the sum.

    These are small tensors of each layer, key/value heads that several TP ranks share, and tied embeddings, which
    the first and the last stage hold.
    """
    sizes = context.timing.sizes
    network = context.network
    shape = context.timing.sizes.shape
    strategies = context.strategies
    most = strategies.stages.tabulate(sizes.trained.stage_layers).max(axis=0)
    seconds: Real = 0.0
    elements = sum(
        kind.count(strategies.stages, within=sizes.differentiated_layers)
        * kind.sizes.partial_elements(sequence_parallel=strategies.sequence_parallel)
        for kind in sizes.kinds
    )
    partial = 4 * np.asarray(elements).max(axis=0)
    if partial.any():
        seconds += network.group("tp").all_reduce(partial) + network.group("copies").all_reduce(partial)
    if sizes.shares_kv_heads:
        columns = shape.hidden_size if shape.lora is None else shape.lora.rank
        keys = 4 * shape.kv_heads * shape.head_dim * columns
        seconds += 2 * most * network.group("tp").all_reduce(keys)
    if sizes.trained.tied and any(sizes.trained.embedding):
        table = 4.0 * sizes.padded_vocab * shape.hidden_size
        seconds += np.where(strategies.pp > 1, network.group("embedding").all_reduce(table), 0.0)
    return seconds


def _cost_parameter_gather(context: CallContext, runs: Sequence[_Run], update: Real) -> Floats:
    """Exposed seconds of the parameter all-gather, which gathers a group of buckets while the next group is
    updated.

    Nothing hides the all-gather of the last group.
    """
    num_buckets = sum(run.buckets for run in runs)
    width = context.timing.element_bytes
    seconds = sum(run.buckets * run.ring.all_gather(width * run.elements / run.buckets) for run in runs)
    last = 1 / np.minimum(GATHER_STAGES, num_buckets)
    return np.maximum(seconds - update * (1 - last) * context.overlap, seconds * last)


def cost_inference(context: CallContext) -> Mapping[str, Floats]:
    timing = context.timing
    attention_cost = estimate_attention_cost(timing.sizes.shape)
    chunks = split_all_work(context.work, context.strategies, attention_cost)
    size = BatchSize.of(chunks, context.strategies)
    selects = context.candidates is not None and context.candidates.ids is None
    outside = OutsideLayers(
        every=timing.embed(size),
        last=timing.head(size) + (timing.likeliest(size) if selects else 0.0),
        comm_first=context.embedding_communication(size.tokens),
        comm_last=context.head_communication(size.tokens),
        results=context.result_communication(size.tokens, chunks),
    )
    layers = [kind.timing.forward(size) for kind in context.kinds]
    if context.strategies.zero == 1:
        return cost_forward_pass(context, chunks, layers, outside)
    sharded = ShardedTraffic(context)
    launched = [
        DeviceHostTime(layer.device, layer.host + sharded.host(kind.one_kind, backward=False))
        for kind, layer in zip(context.kinds, layers, strict=True)
    ]
    terms = cost_forward_pass(context, chunks, launched, outside)
    waits = sharded.forward(SectionSeconds(layers=[layer.device for layer in layers]))
    there = np.arange(len(waits))[:, None] < context.strategies.pp
    agreement = context.network.group("copies").all_reduce(_SMALL)
    terms["data"] = chunks.count * np.where(there, waits, 0.0).max(axis=0) + agreement
    return terms


def cost_forward_pass(
    context: CallContext, chunks: Chunks, times: Sequence[DeviceHostTime], outside: OutsideLayers
) -> dict[str, Floats]:
    """Predict the seconds by term of the forward pass of all chunks through all stages. `times`: a layer of each
    kind for one chunk."""
    tokens = chunks.tokens / context.strategies.cp
    layers = []
    for kind, layer in zip(context.kinds, times, strict=True):
        layer_communication, keys = kind.layer_communication(tokens), kind.key_communication(tokens, chunks)
        experts = kind.expert_communication(tokens)
        host = layer.host + layer_communication.host + keys.host + experts.host
        found = _EqualLayers(
            counts=kind.counts,
            layer=DeviceHostTime(layer.device, host),
            communication=layer_communication.device,
            keys=keys.device,
            experts=experts.device,
        )
        layers.append(found)
    terms, stages = _cost_pipeline(context, chunks, layers, outside)
    terms["pipeline"] = context.strategies.stages.delay(chunks.count, stages, context.hop(tokens))
    return terms


@dataclass(frozen=True, kw_only=True)
class _EqualLayers:
    """Layers that take the same time."""

    counts: Ints
    """Number of such layers on each stage, [stages, strategies]."""
    layer: DeviceHostTime
    """Time of one layer for one chunk."""
    communication: Real
    """Seconds of a layer's TP communication for one chunk."""
    keys: Real = 0.0
    """Seconds in which CP ranks gather a layer's keys and values for one chunk."""
    experts: Real = 0.0
    """Seconds that the device waits while EP ranks exchange a layer's tokens for one chunk."""
    weights: Real = 0.0
    """Part of the layer's seconds for gradients of weights, which no other stage waits for."""

    @property
    def busy(self) -> Real:
        """Seconds that the device computes and communicates."""
        return self.layer.device + self.communication + self.keys + self.experts

    @property
    def wait(self) -> Real:
        """Seconds that the device waits for the host."""
        return np.maximum(0.0, self.layer.host - self.busy)

    @property
    def seconds(self) -> Real:
        """Seconds of one layer for one chunk."""
        return self.busy + self.wait


def _cost_pipeline(
    context: CallContext, chunks: Chunks, layers: Sequence[_EqualLayers], outside: OutsideLayers
) -> tuple[dict[str, Floats], Floats]:
    """Seconds of the busiest stage by term, and the bubble: its idle time while the pipeline fills and drains. Also
    the seconds of a chunk on each stage, [stages, strategies].

    The first chunk passes all stages. Then the slowest stage sets the pace for all other chunks. The sum of the
    terms is the total time.
    """
    pp = context.strategies.pp
    own = outside.own(pp)
    communication, results = outside.communication(pp), at_last(pp, outside.results)
    stages = sum(one.counts * one.seconds for one in layers) + own + communication + results
    slowest = stages.argmax(axis=0), np.arange(len(pp))
    counted = [(one.counts[slowest], one) for one in layers]
    bubble = context.strategies.stages.bubble(chunks.count, stages)
    apart = context.strategies.zero_bubble
    if apart.any():
        weights = np.asarray(sum(one.counts * one.weights for one in layers))
        filled = context.strategies.stages.zero_bubble(chunks.count, stages, weights)
        bubble = np.where(apart, filled, bubble)
    terms = {
        "compute": chunks.count * (sum(n * one.layer.device for n, one in counted) + own[slowest]),
        "tensor": chunks.count * (sum(n * one.communication for n, one in counted) + communication[slowest]),
        "context": chunks.count * (sum(n * one.keys for n, one in counted) + results[slowest]),
        "experts": chunks.count * np.asarray(sum(n * one.experts for n, one in counted)),
        "launch": chunks.count * np.asarray(sum(n * one.wait for n, one in counted)),
        "bubble": bubble,
    }
    return terms, stages
