"""Time model of the portions of a generate call: when each of them has ended."""

import heapq
from collections.abc import Sequence

import numpy as np

from realrl.layout.kv_blocks import count_steps_per_look
from realrl.planner.cost.call_context import CallContext
from realrl.planner.cost.generation import cost_decode_step, cost_generation, split_decode_steps
from realrl.planner.workload.generation import split_generations
from realrl.planner.workload.workload import CallWork
from realrl.program.arrays import Floats


def share_portions(context: CallContext, portions: int) -> list[float]:
    """Predict the share of a generate call's time after which each of its portions has ended on all ranks.

    `context` has one strategy. Drawn answers run in the places of each rank's cache, which gives the decode steps
    until prompts end. The decode segments of the call turn steps into seconds. Prompts that wait for a place are
    prefilled as other prompts end.
    """
    cpu = context.timing.device.cpu
    sizes = split_generations(context.work, context.strategies, cpu=cpu)
    ranks, places, rows = (
        int(np.atleast_1d(n)[0]) for n in (context.strategies.dp, sizes.cache.rows, sizes.rows)
    )
    ends = _draw_ends(context.work, ranks=ranks, places=places, portions=portions)
    (whole,) = sum(cost_generation(context).values(), np.zeros(1))
    steps, spent = [0.0], [0.0]
    looked = count_steps_per_look(cpu=cpu)
    for segment in split_decode_steps(context.work, sizes, steps_per_look=looked, shares=cpu):
        (each,) = sum(cost_decode_step(context, sizes.batches, segment).values(), np.zeros(1))
        (number,) = np.broadcast_to(segment.steps, (1,))
        steps.append(steps[-1] + number)
        spent.append(spent[-1] + number * each)
    prefill, at_once = whole - spent[-1], min(1.0, places / rows)
    decoded = np.interp(np.array(ends) / ends[-1] * steps[-1], steps, spent)
    prefilled = np.minimum(1.0, at_once + np.arange(1, portions + 1) / portions) * prefill
    return ((prefilled + decoded) / whole).tolist()


def _draw_ends(work: CallWork, *, ranks: int, places: int, portions: int) -> list[float]:
    """Draw the answers of a step, and find the decode step at which each portion has ended on all ranks.

    Each rank decodes at most `places` answers at a time. The draws are always the same.
    """
    count = work.sequences
    known = np.sort(np.array(work.answers, dtype=float))
    answers = np.interp((np.arange(count) + 0.5) / count, (np.arange(len(known)) + 0.5) / len(known), known)
    answers[-1] = max(answers[-1], work.longest_answer)
    np.random.default_rng(0).shuffle(answers)
    prompts = answers[: count - count % work.samples].reshape(-1, work.samples)
    found = [0.0] * portions
    for rank in range(min(ranks, len(prompts))):
        ended = np.sort(_run_prompts(prompts[rank::ranks], places))
        for number in range(portions):
            last = -(-len(ended) * (number + 1) // portions) - 1
            found[number] = max(found[number], float(ended[last]))
    return found


def _run_prompts(prompts: Floats, places: int) -> Sequence[float]:
    """Find the decode step at which the last answer of each prompt ends. `prompts`: lengths of answers, [prompts,
    samples]. Answers start in order, as soon as one of the places is free."""
    free = [0.0] * min(places, prompts.size)
    ends = []
    for answers in prompts.tolist():
        end = 0.0
        for length in answers:
            # The earliest free place takes the answer.
            begun = free[0]
            heapq.heapreplace(free, begun + length)
            end = max(end, begun + length)
        ends.append(end)
    return ends
