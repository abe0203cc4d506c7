"""Seconds of generation: prompts at once, then token by token."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import log

from realrl.layout.limits import COMPACTION_SHARE
from realrl.planner.cost.call_context import CallContext
from realrl.planner.cost.passes import OutsideLayers, cost_forward_pass
from realrl.planner.workload.batching import Chunks, split_work
from realrl.planner.workload.workload import CallWork

_SEGMENTS = 8
"""Stretches of steps in which rows and context are taken to be constant."""


@dataclass(frozen=True)
class DecodeSegment:
    """Some steps of a continuation, with the sequences that go on and the tokens they have in the cache, and how
    often the cache is copied without those that have ended."""

    steps: float
    rows: float
    context: float
    drops: float


def split_decode_steps(work: CallWork, rows: float) -> Iterator[DecodeSegment]:
    """The steps of a continuation of `rows` sequences after the first token, until the longest of them ends.

    Attention reads as far as the longest row that goes on.
    """
    answers, prompts = sorted(work.answers), sorted(work.lengths)
    # Of n draws the largest is at the quantile n / (n + 1), on average.
    steps = answers[min(len(answers) - 1, int(len(answers) * rows / (rows + 1)))] - 1
    prompt = prompts[min(len(prompts) - 1, int(len(prompts) * rows / (rows + 1)))]
    for i in range(_SEGMENTS):
        begin, end = steps * i / _SEGMENTS, steps * (i + 1) / _SEGMENTS
        alive, left = (max(1 / rows, sum(a > n for a in answers) / len(answers)) for n in (begin, end))
        context = prompt + (begin + end + 1) / 2
        yield DecodeSegment(
            end - begin, max(1.0, rows * alive), context, log(alive / left) / -log(COMPACTION_SHARE)
        )


def cost_generation(context: CallContext) -> Mapping[str, float]:
    """Terms of a generate call.

    As many continuations as there are stages are under way at once; each of their tokens passes all stages one
    after the other and comes back to the first.
    """
    timing, strategy, work = context.timing, context.strategy, context.work
    chunks = split_work(work, strategy, timing.efficiency.generation_chunks_per_stage)
    size = context.size(chunks)
    room = chunks.sequences * (max(work.lengths) + work.room)
    enter = timing.enter(size)
    outside = OutsideLayers(
        enter + timing.allocate(_cache_bytes(context, room)),
        last=timing.start(size, chunks.sequences) - enter,
        comm_first=context.layer_communication(chunks.tokens).device / 2,
        comm_last=context.sample_communication(chunks.sequences),
    )
    terms = cost_forward_pass(context, chunks, timing.prefill(size), outside)
    rounds = -(-chunks.count // strategy.pp)
    terms["decode"] = 0.0
    for segment in split_decode_steps(work, chunks.sequences):
        kept = timing.copy(_cache_bytes(context, segment.rows * segment.context))
        terms["decode"] += chunks.count * segment.drops * kept
        for name, seconds in _cost_decode_step(context, chunks, segment).items():
            terms[name] += rounds * segment.steps * seconds
    return terms


def _cache_bytes(context: CallContext, tokens: float) -> float:
    """Of keys and values of so many tokens, on the stage with most layers."""
    timing = context.timing
    return 2 * max(context.layers) * tokens * timing.sizes.cache_dim * timing.element_bytes


def _cost_decode_step(context: CallContext, chunks: Chunks, segment: DecodeSegment) -> dict[str, float]:
    """Terms of one more token for each continuation that is under way, on the busiest stage.

    A token passes all stages before the next one is begun, and each stage works on one continuation at a time:
    whichever takes longer.
    """
    timing, layers, rows = context.timing, context.layers, segment.rows
    layer, sample, layer_communication = (
        timing.decode(rows, segment.context),
        timing.sample(rows),
        context.layer_communication(rows),
    )
    wait = max(0.0, layer.host + layer_communication.host - layer.device - layer_communication.device)
    outside = OutsideLayers(
        timing.decode_step_overhead(rows),
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
    # Each stage receives once and sends once; the last hop is that of the tokens drawn, back to the first stage.
    hop = context.hop(rows)
    stages = [sum(parts) + hop for parts in zip(own, communication, waits, strict=True)]
    slowest = stages.index(max(stages))
    under_way = min(chunks.count, len(layers))
    return {
        "decode": under_way * own[slowest],
        "tensor": under_way * communication[slowest],
        "launch": under_way * waits[slowest],
        "pipeline": under_way * hop,
        "bubble": max(0.0, sum(stages) - under_way * stages[slowest]),
    }
