"""Seconds of generation: prompts at once, then token by token."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import log

from realrl.layout.limits import COMPACTION_SHARE
from realrl.planner.cost.passes import Ends, forward_pass
from realrl.planner.cost.setting import Setting
from realrl.planner.workload.batching import Chunks, split_work
from realrl.planner.workload.workload import CallWork

_SEGMENTS = 8
"""Stretches of steps in which rows and context are taken to be constant."""


@dataclass(frozen=True)
class Stretch:
    """Some steps of a continuation, with the sequences that go on and the tokens they have in the cache, and how
    often the cache is copied without those that have ended."""

    steps: float
    rows: float
    context: float
    drops: float


def stretches(work: CallWork, rows: float) -> Iterator[Stretch]:
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
        yield Stretch(
            end - begin, max(1.0, rows * alive), context, log(alive / left) / -log(COMPACTION_SHARE)
        )


def generation(setting: Setting) -> Mapping[str, float]:
    """Terms of a generate call.

    As many continuations as there are stages are under way at once; each of their tokens passes all stages one
    after the other and comes back to the first.
    """
    timing, strategy, work = setting.timing, setting.strategy, setting.work
    chunks = split_work(work, strategy, timing.efficiency.generation_chunks_per_stage)
    size = setting.size(chunks)
    room = chunks.sequences * (max(work.lengths) + work.room)
    enter = timing.enter(size)
    ends = Ends(
        enter + timing.allocate(_cache_bytes(setting, room)),
        last=timing.start(size, chunks.sequences) - enter,
        told_first=setting.exchanges(chunks.tokens).device / 2,
        told_last=setting.sample_exchanges(chunks.sequences),
    )
    terms = forward_pass(setting, chunks, timing.prefill(size), ends)
    turns = -(-chunks.count // strategy.pp)
    terms["decode"] = 0.0
    for stretch in stretches(work, chunks.sequences):
        kept = timing.copy(_cache_bytes(setting, stretch.rows * stretch.context))
        terms["decode"] += chunks.count * stretch.drops * kept
        for name, seconds in _turn(setting, chunks, stretch).items():
            terms[name] += turns * stretch.steps * seconds
    return terms


def _cache_bytes(setting: Setting, tokens: float) -> float:
    """Of keys and values of so many tokens, on the stage with most layers."""
    timing = setting.timing
    return 2 * max(setting.layers) * tokens * timing.sizes.cached * timing.element_bytes


def _turn(setting: Setting, chunks: Chunks, stretch: Stretch) -> dict[str, float]:
    """Terms of one more token for each continuation that is under way, on the busiest stage.

    A token passes all stages before the next one is begun, and each stage works on one continuation at a time:
    whichever takes longer.
    """
    timing, layers, rows = setting.timing, setting.layers, stretch.rows
    layer, sample, exchanges = (
        timing.decode(rows, stretch.context),
        timing.sample(rows),
        setting.exchanges(rows),
    )
    wait = max(0.0, layer.host + exchanges.host - layer.device - exchanges.device)
    ends = Ends(
        timing.turn(rows),
        last=sample.device,
        told_first=exchanges.device / 2,
        told_last=setting.sample_exchanges(rows),
    )
    own = [n * layer.device + end for n, end in zip(layers, ends.own(len(layers)), strict=True)]
    told = [n * exchanges.device + end for n, end in zip(layers, ends.told(len(layers)), strict=True)]
    waits = [n * wait for n in layers]
    waits[-1] += sample.wait
    # Each stage receives once and sends once; the last hop is that of the tokens drawn, back to the first stage.
    hop = setting.hop(rows)
    stages = [sum(parts) + hop for parts in zip(own, told, waits, strict=True)]
    slowest = stages.index(max(stages))
    under_way = min(chunks.count, len(layers))
    return {
        "decode": under_way * own[slowest],
        "tensor": under_way * told[slowest],
        "launch": under_way * waits[slowest],
        "pipeline": under_way * hop,
        "bubble": max(0.0, sum(stages) - under_way * stages[slowest]),
    }
