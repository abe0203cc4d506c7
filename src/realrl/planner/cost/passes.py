"""Seconds of training and inference: whole sequences, once or several times through the model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from realrl.planner.cost.setting import Setting
from realrl.planner.cost.timing import Part
from realrl.planner.workload.batching import Chunks, split_work
from realrl.planner.workload.sizes import buckets

_SMALL = 64
"""Bytes of the sums of figures, of which ranks wait for a few in every optimizer step."""


@dataclass(frozen=True)
class Ends:
    """Seconds of one chunk outside the layers: on every stage, on the first and on the last one, and what
    tensor ranks tell each other on the first and on the last one."""

    every: float = 0.0
    first: float = 0.0
    last: float = 0.0
    told_first: float = 0.0
    told_last: float = 0.0

    def own(self, stages: int) -> list[float]:
        """What each stage computes."""
        return _by_stage(stages, self.every, self.first, self.last)

    def told(self, stages: int) -> list[float]:
        """What its tensor ranks tell each other."""
        return _by_stage(stages, 0.0, self.told_first, self.told_last)


def _by_stage(stages: int, every: float, first: float, last: float) -> list[float]:
    found = [every] * stages
    found[0] += first
    found[-1] += last
    return found


def training(setting: Setting) -> Mapping[str, float]:
    """Terms of all optimizer steps of a train call, under the 1F1B schedule.

    Layers below the first one that is trained have no backward pass; nor have frozen embeddings. Not modelled is
    what else a frozen part spares: the gradient of a tied head's weight, and messages to stages without a backward
    pass.
    """
    timing, strategy, work = setting.timing, setting.strategy, setting.work
    chunks = split_work(work, strategy, timing.efficiency.pass_chunks_per_stage)
    size = setting.size(chunks)
    forward, backward = timing.forward(size), timing.backward(size)
    exchanges = setting.exchanges(chunks.tokens)
    rounds = 3 if strategy.recompute else 2
    device = backward.device + forward.device * (rounds - 1)
    host = backward.host + forward.host * (rounds - 1)
    trained = timing.sizes.trained
    updated = trained.stage_layers(strategy.pp)
    frozen = [n - k for n, k in zip(setting.layers, updated, strict=True)]
    layers = [
        _Layers(updated, Part(device, host + rounds * exchanges.host), rounds * exchanges.device),
        _Layers(frozen, Part(forward.device, forward.host + exchanges.host), exchanges.device),
    ]
    ends = Ends(
        timing.enter(size),
        timing.enter_backward(size) if any(trained.embedding) else 0.0,
        timing.head(size) + timing.head_backward(size),
        exchanges.device / 2,
        setting.head_exchanges(chunks.tokens) + setting.head_exchanges_backward(chunks.tokens),
    )
    terms = _pipelined(setting, chunks, layers, ends)
    if strategy.pp > 1:
        # Forward waits for backward of the next stage and the other way round, so that nothing hides transfers.
        terms["pipeline"] = 2 * (chunks.count + strategy.pp - 1) * setting.hop(chunks.tokens)
        terms["pipeline"] += 2 * setting.network.hop(_SMALL)
    elements = max(trained.stage_elements(strategy.pp))
    update = timing.update(elements, strategy.dp)
    terms["optimizer"] = update + setting.network.everyone.all_reduce(_SMALL)
    last_pass = updated[-1] * backward.device
    terms["data"] = _gradients(setting, elements, last_pass) + _parameters(setting, elements, update)
    steps = work.minibatches * work.passes
    total = {name: seconds * steps for name, seconds in terms.items()}
    total["compute"] += timing.prepare(work.sequences / strategy.dp, work.episode)
    return total


def _gradients(setting: Setting, elements: int, last_pass: float) -> float:
    """Adding float32 gradients up: while the last micro-batch goes backward, but for the last bucket.

    Parameters of which tensor ranks or stages each have a part of the gradient must be completed before.
    """
    network, parts = setting.network, buckets(elements)
    seconds = parts * network.data.reduce_scatter(4 * elements / parts)
    small = 3 * network.data.all_reduce(_SMALL)
    completion = _completion(setting)
    if completion:
        return small + completion + seconds
    return small + max(seconds - last_pass * setting.overlap, seconds / parts)


def _completion(setting: Setting) -> float:
    """Adding up gradients of what several ranks hold but each computed only a part of."""
    sizes, network, shape = setting.timing.sizes, setting.network, setting.timing.sizes.shape
    seconds, most = 0.0, max(sizes.trained.stage_layers(setting.strategy.pp))
    partial = sizes.partial_elements(sequence_parallel=setting.strategy.sequence_parallel)
    if most * partial:
        seconds += network.tensor.all_reduce(4 * most * partial)
    if sizes.shares_keys:
        keys = 4 * shape.kv_heads * shape.head_dim * shape.hidden_size
        seconds += 2 * most * network.tensor.all_reduce(keys)
    if sizes.trained.tied and any(sizes.trained.embedding) and setting.strategy.pp > 1:
        seconds += network.ends.all_reduce(4 * sizes.vocabulary * shape.hidden_size)
    return seconds


def _parameters(setting: Setting, elements: int, update: float) -> float:
    """Collecting parameters: while the next bucket is updated."""
    parts = buckets(elements)
    seconds = parts * setting.network.data.all_gather(setting.timing.element_bytes * elements / parts)
    return max(seconds - update * setting.overlap, seconds / parts)


def inference(setting: Setting) -> Mapping[str, float]:
    """Terms of an inference call."""
    timing, strategy = setting.timing, setting.strategy
    chunks = split_work(setting.work, strategy, timing.efficiency.pass_chunks_per_stage)
    size = setting.size(chunks)
    ends = Ends(
        timing.enter(size),
        last=timing.head(size),
        told_first=setting.exchanges(chunks.tokens).device / 2,
        told_last=setting.head_exchanges(chunks.tokens),
    )
    return forward_pass(setting, chunks, timing.forward(size), ends)


def forward_pass(setting: Setting, chunks: Chunks, layer: Part, ends: Ends) -> dict[str, float]:
    """Terms of chunks that go through all stages once."""
    exchanges = setting.exchanges(chunks.tokens)
    layers = _Layers(setting.layers, Part(layer.device, layer.host + exchanges.host), exchanges.device)
    terms = _pipelined(setting, chunks, [layers], ends)
    # Sends do not wait, and a stage works on the next chunk meanwhile.
    terms["pipeline"] = (setting.strategy.pp - 1) * setting.hop(chunks.tokens)
    return terms


@dataclass(frozen=True)
class _Layers:
    """Layers that cost the same."""

    counts: Sequence[int]
    """On each stage."""
    layer: Part
    """One of them, for one chunk."""
    exchanges: float
    """What its tensor-parallel ranks communicate."""

    @property
    def wait(self) -> float:
        """How long the device waits for the host."""
        return max(0.0, self.layer.host - self.layer.device - self.exchanges)

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.layer.device + self.exchanges + self.wait


def _pipelined(setting: Setting, chunks: Chunks, layers: Sequence[_Layers], ends: Ends) -> dict[str, float]:
    """Terms of the busiest stage, and how long it waits while others start or end alone.

    A pipeline takes one chunk through all stages and all other chunks through the slowest one.
    """
    pp = setting.strategy.pp
    own, told = ends.own(pp), ends.told(pp)
    stages = [sum(one.counts[s] * one.seconds for one in layers) + own[s] + told[s] for s in range(pp)]
    slowest = stages.index(max(stages))
    counted = [(one.counts[slowest], one) for one in layers]
    return {
        "compute": chunks.count * (sum(n * one.layer.device for n, one in counted) + own[slowest]),
        "tensor": chunks.count * (sum(n * one.exchanges for n, one in counted) + told[slowest]),
        "launch": chunks.count * sum(n * one.wait for n, one in counted),
        "bubble": sum(stages) - stages[slowest],
    }
