"""Seconds of generation: prompts at once, then token by token."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from realrl.planner.batching import Chunks, generation_chunks
from realrl.planner.passes import Setting, forward_pass
from realrl.planner.workload import CallWork

_SEGMENTS = 8
"""Stretches of steps in which rows and context are taken to be constant."""


@dataclass(frozen=True)
class Stretch:
    """Some steps of a continuation, with the sequences that go on and the tokens they have in the cache."""

    steps: float
    rows: float
    context: float


def stretches(work: CallWork, rows: float) -> Iterator[Stretch]:
    """The steps of a continuation of `rows` sequences, until the longest of them ends.

    Rows that have ended are dropped when a fifth has; attention reads as far as the longest row that goes on.
    """
    answers, prompts = sorted(work.answers), sorted(work.lengths)
    # Of n draws the largest is at the quantile n / (n + 1), on average.
    steps = answers[min(len(answers) - 1, int(len(answers) * rows / (rows + 1)))]
    prompt = prompts[min(len(prompts) - 1, int(len(prompts) * rows / (rows + 1)))]
    for i in range(_SEGMENTS):
        begin, end = steps * i / _SEGMENTS, steps * (i + 1) / _SEGMENTS
        alive = sum(answer > begin for answer in answers) / len(answers)
        yield Stretch(end - begin, max(1.0, rows * alive), prompt + (begin + end) / 2)


def generation(setting: Setting) -> Mapping[str, float]:
    """Terms of a generate call.

    As many continuations as there are stages are under way at once; each of their tokens passes all stages one
    after the other and comes back to the first, so that a turn takes the sum of the stages.
    """
    timing, strategy, work = setting.timing, setting.strategy, setting.work
    chunks = generation_chunks(work, strategy, timing.efficiency.generation_chunks_per_stage)
    terms = forward_pass(setting, chunks, timing.sample(chunks.sequences).device)
    turns = -(-chunks.count // strategy.pp)
    terms["decode"] = 0.0
    for stretch in stretches(work, chunks.sequences):
        for name, seconds in _turn(setting, chunks, stretch).items():
            terms[name] += turns * stretch.steps * seconds
    return terms


def _turn(setting: Setting, chunks: Chunks, stretch: Stretch) -> dict[str, float]:
    """Terms of one more token for each continuation that is under way."""
    timing, pp, total = setting.timing, setting.strategy.pp, setting.timing.sizes.shape.layers
    layer = timing.decode(stretch.rows, stretch.context)
    exchanges, sample = setting.exchanges(stretch.rows), timing.sample(stretch.rows)
    wait = max(0.0, layer.host + exchanges.host - layer.device - exchanges.device)
    # The share of its turn in which a stage works, where all have the same number of layers.
    busy = min(chunks.count, pp) / pp
    work = {
        "decode": busy * (total * layer.device + sample.device),
        "tensor": busy * total * exchanges.device,
        "launch": busy * (total * wait + sample.wait),
        # The last hop is that of the tokens drawn, back to the first stage.
        "pipeline": pp * setting.hop(stretch.rows),
    }
    whole = total * (layer.device + exchanges.device + wait) + sample.device + sample.wait
    return work | {"bubble": (1 - busy) * whole}
