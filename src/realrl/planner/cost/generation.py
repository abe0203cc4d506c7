"""Time model of generate calls: prefill and decode steps."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import log

from realrl.layout.limits import COMPACTION_SHARE
from realrl.planner.cost.call_context import CallContext
from realrl.planner.cost.passes import OutsideLayers, cost_forward_pass
from realrl.planner.memory.kv_cache import kv_cache_bytes
from realrl.planner.workload.batching import Chunks, split_work
from realrl.planner.workload.workload import CallWork

_SEGMENTS = 8
"""Segments of decode steps in which rows and context length are taken to be constant."""


@dataclass(frozen=True)
class DecodeSegment:
    """Decode steps with a constant number of rows and context length.

    `rows`: unfinished sequences; `context`: tokens in the KV cache per row, to which a shared prompt adds its part;
    `drops`: how often the cache is compacted to unfinished rows.
    """

    steps: float
    rows: float
    context: float
    drops: float


def split_decode_steps(work: CallWork, rows: float, prompts: float) -> Iterator[DecodeSegment]:
    """Split the decode steps of `rows` sequences after the first token, until the longest of them ends.

    Attention reads up to the longest unfinished row. It reads each of `prompts` once for all its unfinished rows,
    of which any number may be left.
    """
    answers = sorted(work.answers)
    lengths = sorted(work.lengths)
    together = rows / prompts
    # Of n draws the largest is at the quantile n / (n + 1), on average.
    steps = answers[min(len(answers) - 1, int(len(answers) * rows / (rows + 1)))] - 1
    prompt = lengths[min(len(lengths) - 1, int(len(lengths) * prompts / (prompts + 1)))]
    for i in range(_SEGMENTS):
        begin = steps * i / _SEGMENTS
        end = steps * (i + 1) / _SEGMENTS
        alive, left = (max(1 / rows, sum(a > n for a in answers) / len(answers)) for n in (begin, end))
        read = (1 - (1 - alive) ** together) / (
            alive * together
        )  # prompts that are left, per row that is left
        context = read * prompt + (begin + end + 1) / 2
        yield DecodeSegment(
            end - begin, max(1.0, rows * alive), context, log(alive / left) / -log(COMPACTION_SHARE)
        )


def cost_generation(context: CallContext) -> Mapping[str, float]:
    """Cost a generate call, in seconds by term.

    One decode batch per pipeline stage is in flight at a time; each of its tokens passes all stages in turn and is
    sent back to the first.
    """
    timing = context.timing
    strategy = context.strategy
    work = context.work
    chunks = split_work(work, strategy, timing.efficiency.generation_chunks_per_stage)
    size = context.size(chunks)
    capacity = chunks.sequences * max(work.lengths) + chunks.rows * work.room
    embedding = timing.embed(size)
    # Prompts that are shared have several first tokens.
    more = timing.sample(chunks.rows).device - timing.sample(chunks.sequences).device
    outside = OutsideLayers(
        every=embedding + timing.allocate(_cache_bytes(context, capacity)),
        last=timing.start(size, chunks.sequences) + more - embedding,
        comm_first=context.layer_communication(chunks.tokens).device / 2,
        comm_last=context.sample_communication(chunks.rows),
    )
    terms = cost_forward_pass(context, chunks, timing.prefill(size), outside)
    rounds = -(-chunks.count // strategy.pp)
    terms["decode"] = 0.0
    for segment in split_decode_steps(work, chunks.rows, chunks.sequences):
        compaction = timing.copy(_cache_bytes(context, segment.rows * segment.context))
        terms["decode"] += chunks.count * segment.drops * compaction
        for name, seconds in _cost_decode_step(context, chunks, segment).items():
            terms[name] += rounds * segment.steps * seconds
    return terms


def _cache_bytes(context: CallContext, tokens: float) -> int:
    """KV-cache bytes of `tokens`, on the stage with most layers."""
    timing = context.timing
    return kv_cache_bytes(
        timing.sizes, tokens=tokens, layers=max(context.layers), element_bytes=timing.element_bytes
    )


def _cost_decode_step(context: CallContext, chunks: Chunks, segment: DecodeSegment) -> dict[str, float]:
    """Cost one decode step of all decode batches in flight, in seconds by term.

    A token passes all stages before the next one starts, and each stage works on one decode batch at a time; the
    step takes as long as the slower of the two.
    """
    timing = context.timing
    layers = context.layers
    rows = segment.rows
    layer = timing.decode(rows, segment.context)
    sample = timing.sample(rows)
    layer_communication = context.layer_communication(rows)
    wait = max(0.0, layer.host + layer_communication.host - layer.device - layer_communication.device)
    outside = OutsideLayers(
        every=timing.decode_step_overhead(rows),
        last=sample.device,
        comm_first=layer_communication.device / 2,
        comm_last=context.sample_communication(rows),
    )
    own = [n * layer.device + end for n, end in zip(layers, outside.own(len(layers)), strict=True)]
    communication = [
        n * layer_communication.device + end
        for n, end in zip(layers, outside.communication(len(layers)), strict=True)
    ]
    waits = [n * wait for n in layers]
    waits[-1] += sample.wait
    # Each stage receives once and sends once; the last hop sends the sampled tokens back to the first stage.
    hop = context.hop(rows)
    stages = [sum(parts) + hop for parts in zip(own, communication, waits, strict=True)]
    slowest = stages.index(max(stages))
    in_flight = min(chunks.count, len(layers))
    return {
        "decode": in_flight * own[slowest],
        "tensor": in_flight * communication[slowest],
        "launch": in_flight * waits[slowest],
        "pipeline": in_flight * hop,
        "bubble": max(0.0, sum(stages) - in_flight * stages[slowest]),
    }
