"""Time model of generate calls: prefill and decode steps."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from realrl.layout.kv_blocks import REPLACED_TOGETHER, count_graphs, count_steps_per_look, pad_rows
from realrl.planner.cost.call_context import CallContext
from realrl.planner.cost.passes import OutsideLayers, at_last, cost_forward_pass
from realrl.planner.cost.timing import BatchSize
from realrl.planner.memory.activations import kv_cache_bytes
from realrl.planner.workload.generation import GenerationWork, split_generations
from realrl.planner.workload.workload import CallWork
from realrl.program.arrays import Floats, Ints, Real, apply_each, truncate

_EVEN = 12**-0.5
"""Standard deviation of a uniform distribution, as a share of its width."""
_ROUNDS = 6
"""Number of times that the seconds of a decode step and the number of decoded rows are computed from each other."""
_SEGMENTS = 8
"""Number of segments that split the decode steps of the last rows. The model assumes a constant number of rows, and
a constant context length, within a segment."""


@dataclass(frozen=True)
class DecodeSegment:
    """Decode steps with a constant number of rows and context length."""

    steps: Real
    rows: Real
    """Sequences that are decoded, in all decode batches."""
    context: Real
    """Tokens in the KV cache that attention reads per row."""


def split_decode_steps(
    work: CallWork,
    sizes: GenerationWork,
    *,
    steps_per_look: int,
    shares: bool,
    steps: Floats | None = None,
    active: Real = 1.0,
) -> Iterator[DecodeSegment]:
    """Split the decode steps of a call into segments, until its longest sequence ends.

    The host looks at new tokens only every `steps_per_look` steps, so answer lengths are rounded up to a multiple
    of it. Finished rows are replaced several at a time. The first segment lasts while rows wait for a place in the
    full cache. The next segments decode the last rows, whose number falls as sequences end. The model assumes that
    all of these rows begin at their first token. In the last segment, the rank with the longest answer of all ranks
    decodes it alone. Attention reads the cached tokens of each row. If `shares` is
    true, it reads a prompt once for all rows of the prompt.

    With an environment, a row takes part in `steps` decode steps, its waiting included, [N, strategies or 1]. It is
    decoded in the share `active` of them, and needs no place while it waits.
    """
    tokens = np.sort([-(-n // steps_per_look) * steps_per_look for n in work.answers])
    lengths = tokens[:, None] if steps is None else np.sort(steps, axis=0)
    count = len(lengths)
    together = sizes.rows / sizes.prompts
    most: Real = sizes.cache.rows
    if work.environment is not None:
        # Of the trajectories that are under way, this many are decoded.
        most = np.minimum(most, np.maximum(1.0, work.environment.rows_at_once * active))
    mean = lengths.mean(axis=0)
    # Mean answer tokens in the cache over all decode steps: an answer of n tokens contributes 0 + 1 + ... + n - 1.
    own = (tokens * (tokens - 1)).mean() / (2 * tokens.mean())
    read = 1 / together if shares else 1.0
    # Rows of equal length end together. Otherwise finished rows wait until 1 / REPLACED_TOGETHER of the rows have
    # ended, so that half of this share is idle on average.
    waiting = np.where(lengths[0] == lengths[-1], 0.0, 1 / (2 * REPLACED_TOGETHER))
    # This many rows fill all places, although some of them wait.
    last = np.minimum(sizes.rows, most / active)
    first = (sizes.rows - last) * mean * active / (most * (1 - waiting))
    yield DecodeSegment(first, most, read * work.mean + own)
    # The largest of n draws is at the quantile n / (n + 1) on average.
    place = np.atleast_1d(np.minimum(count - 1, truncate(count * last / (last + 1))))
    longest = np.take_along_axis(np.broadcast_to(lengths, (count, len(place))), place[None], axis=0)[0]
    per_step = tokens.mean() / mean
    for i in range(_SEGMENTS):
        begin = longest * i / _SEGMENTS
        end = longest * (i + 1) / _SEGMENTS
        alive = np.maximum(1 / last, (lengths > begin).mean(axis=0))
        # Number of prompts with an unfinished row per unfinished row, if rows end independently.
        read = (1 - (1 - alive) ** together) / (alive * together) if shares else 1.0
        # The first decode step of a row reads its prompt alone: the step's input is the prompt's last token.
        context = read * work.mean + ((begin + end) * per_step - 1) / 2
        yield DecodeSegment(end - begin, np.maximum(1.0, last * alive * active), context)
    if steps is None:
        alone = np.maximum(0, work.longest_answer - longest)
        yield DecodeSegment(alone, 1.0, work.mean + longest + alone / 2)


def cost_generation(context: CallContext) -> Mapping[str, Floats]:
    """Predict the seconds of a generate call by term.

    The pipeline has one decode batch in flight per stage. The tokens of a batch pass all stages in turn, and the
    last stage sends the sampled tokens back to the first. CP ranks divide the tokens of prefills. In decode steps,
    each of them computes all rows, but attends only to its part of the cache.
    """
    timing = context.timing
    work = context.work
    cpu = timing.device.cpu
    sizes = split_generations(work, context.strategies, cpu=cpu)
    passes = sizes.passes
    size = BatchSize.of(passes, context.strategies)
    embedding = timing.embed(size)
    cache = kv_cache_bytes(
        timing.sizes,
        tokens=sizes.cache.tokens,
        layers=context.layers.max(axis=0),
        element_bytes=timing.element_bytes,
    )
    last = context.find_kind(timing.sizes.shape.layers - 1)
    outside = OutsideLayers(
        every=embedding + timing.allocate(cache) / passes.count,
        # A prefill ends with the keys and values of the last layer. So the last stage computes these instead of a
        # whole layer, and skips that layer's all-reduces. `start` includes the embedding, which `every` has
        # counted.
        last=last.timing.start(size) - embedding - last.timing.prefill(size).device,
        comm_first=context.embedding_communication(size.tokens),
        comm_last=-last.layer_communication(size.tokens).device,
    )
    prefills = [kind.timing.prefill(size) for kind in context.kinds]
    terms = cost_forward_pass(context, passes, prefills, outside)
    if context.strategies.ep > 1:
        skipped = passes.count * last.expert_communication(size.tokens).device
        terms["experts"] = terms["experts"] - np.where(context.strategies.pp == 1, skipped, 0.0)
    decoding = (
        _cost_decode_steps(context, sizes)[0] if work.environment is None else _cost_turns(context, sizes)
    )
    for name, seconds in decoding.items():
        terms[name] = terms.get(name, 0.0) + seconds
    terms["launch"] = terms["launch"] + _cost_captures(context, sizes)
    return terms


def _cost_decode_steps(
    context: CallContext, sizes: GenerationWork, steps: Floats | None = None, active: Real = 1.0
) -> tuple[dict[str, Floats], Floats]:
    """Predict the seconds by term of all decode steps, and their number. `steps` and `active` as for
    `split_decode_steps`."""
    cpu = context.timing.device.cpu
    terms = {"decode": np.zeros(len(sizes.rows))}
    number = np.zeros(len(sizes.rows))
    looked = count_steps_per_look(cpu=cpu)
    segments = split_decode_steps(
        context.work, sizes, steps_per_look=looked, shares=cpu, steps=steps, active=active
    )
    for segment in segments:
        number = number + segment.steps
        for name, seconds in cost_decode_step(context, sizes.batches, segment).items():
            terms[name] = terms.get(name, 0.0) + segment.steps * seconds
    return terms, number


def _cost_turns(context: CallContext, sizes: GenerationWork) -> dict[str, Floats]:
    """Predict the seconds by term of decode steps with an environment, and of prefilling what it gives.

    A row that waits takes part in decode steps without being decoded: as many as the others make meanwhile. Their
    number depends on the seconds of a step, which depend on the number of rows that are decoded. So both are found
    in turns. `environment` is the time that waiting adds.
    """
    work, environment = context.work, context.work.environment
    assert environment is not None, "the call has an environment"
    waits = environment.waits[:, None]
    tokens = np.sort(np.resize(work.answers, len(waits))).astype(float)
    sampled = (tokens * max(0.0, 1 - environment.given / tokens.mean()))[:, None]
    sampled = np.maximum(sampled, 1.0)
    turn = sampled.mean() / environment.turns
    terms, number = _cost_decode_steps(context, sizes, sampled)
    alone = terms
    for _ in range(_ROUNDS):
        each = sum(terms.values(), np.zeros(len(sizes.rows))) / number
        # If more objects are asked than may answer at the same time, answers take longer.
        queueing = sizes.rows / environment.at_once - turn * each / max(environment.seconds, 1e-9)
        waited = waits * np.maximum(1.0, queueing)
        steps = sampled + waited / each
        active = sampled.mean() / steps.mean(axis=0)
        terms, number = _cost_decode_steps(context, sizes, steps, active)
    before = sum(alone.values(), np.zeros(len(sizes.rows)))
    added_apart = sum(terms.values(), np.zeros(len(sizes.rows))) - before
    # Rows begin together. If their turns and waits are alike, they stay together, and nothing hides their waiting.
    cycle = before / sampled.mean() * turn + environment.seconds
    spread = np.hypot(before / sampled.mean() * sampled.std() / environment.turns**0.5, environment.deviation)
    passed = np.arange(1, np.ceil(environment.turns) + 1)[:, None]
    apart = np.minimum(1.0, spread / cycle / _EVEN * passed**0.5).mean(axis=0)
    together = np.minimum(sizes.cache.rows, min(environment.at_once, environment.rows_at_once))
    apart = np.where(sizes.rows > together, 1.0, apart)
    added = apart * added_apart + (1 - apart) * environment.waits.mean()
    # Nothing hides the first answers, which all rows wait for, and the last answer.
    split = {**alone, "environment": np.maximum(added, 2 * environment.seconds)}
    rows = np.clip(sizes.rows * active, 1.0, sizes.cache.rows)
    # Some rows return in this part of all decode steps, and are prefilled together. Ranks that decode in step wait
    # for the prefills of all of them.
    passes = np.maximum(1.0, number * (1 - np.exp(-sizes.together * rows / turn)))
    given = sizes.rows * environment.given
    known, cp = work.mean + tokens.mean() / 2, context.strategies.cp
    each_pass = BatchSize(
        tokens=np.maximum(1.0, given / passes) / cp,
        squares=np.maximum(1.0, 2 * given * known / passes) / cp,
    )
    layers = sum(kind.counts * kind.timing.prefill(each_pass).device for kind in context.kinds)
    split["compute"] = passes * np.asarray(layers).max(axis=0) * (environment.given > 0)
    sent = sum(kind.counts * kind.expert_communication(each_pass.tokens).device for kind in context.kinds)
    split["experts"] = split["experts"] + passes * np.asarray(sent).max(axis=0) * (environment.given > 0)
    # CP ranks gather the queries, keys and values of the new tokens, and attend with all of them to their parts of
    # the cache.
    gathered = sum(kind.counts * kind.part_communication(each_pass.tokens).device for kind in context.kinds)
    split["context"] = split["context"] + passes * np.asarray(gathered).max(axis=0) * (environment.given > 0)
    return split


def cost_kept_captures(context: CallContext) -> Floats:
    """Predict the seconds of graph capture that a generate call saves if its parameters have not moved since the
    last step.

    The engine then reuses the graphs of the last step (`KeptDecoding`), if the device has room to keep them.
    """
    sizes = split_generations(context.work, context.strategies, cpu=context.timing.device.cpu)
    lora = context.timing.sizes.shape.lora
    # The engine computes DoRA's factors anew for each call, and drops graphs with collectives after each call.
    alone = (context.strategies.cp == 1) & (context.strategies.tp == 1 == context.strategies.ep)
    keeps = alone & (lora is None or not lora.dora)
    return np.where(keeps, _cost_captures(context, sizes), 0.0)


def _cost_captures(context: CallContext, sizes: GenerationWork) -> Floats:
    """Host seconds to capture all graphs of a call.

    There is one graph per number of rows. The host launches the kernels of each graph twice: once kernel by kernel
    for the first step, and once to capture the graph.
    """
    timing, work = context.timing, context.work
    if not timing.decodes_by_graphs:
        return np.zeros(len(sizes.rows))
    alike = min(work.answers) == max(work.answers)
    graphs = 1 if alike else apply_each(count_graphs, sizes.rows_per_batch)
    cp = context.strategies.cp
    collectives = 2 * (context.strategies.tp > 1) + 2 * (context.strategies.ep > 1)
    further = collectives + (cp > 1) + timing.count_merge_operations(cp)
    layers = sum(kind.counts * (kind.timing.decode_operations + further) for kind in context.kinds)
    operations = np.asarray(layers).max(axis=0) + timing.roofline.count_sampling_operations(
        context.work.sampling
    )
    return sizes.batches * graphs * 2 * operations * timing.device.kernel_s


def cost_decode_step(context: CallContext, batches: Ints, segment: DecodeSegment) -> dict[str, Floats]:
    """Predict the seconds by term of one decode step of all decode batches in flight.

    A token passes all stages before the next token starts, which takes the summed time of all stages. Each stage
    works on one decode batch at a time, so the slowest stage needs its time once per batch. The step takes the
    longer of the two times.
    """
    timing = context.timing
    pp = context.strategies.pp
    own_rows = np.maximum(1.0, segment.rows / batches)
    # A GPU pads rows to the size of a captured graph. The padding has no keys, so the mean context is shorter.
    rows = own_rows if timing.device.cpu else apply_each(pad_rows, truncate(np.ceil(own_rows)))
    sample = timing.sample(rows, context.work.sampling)
    outside = OutsideLayers(
        every=timing.decode_step_overhead(rows),
        last=sample.device,
        comm_first=context.embedding_communication(rows),
        comm_last=context.sample_communication(rows),
    )
    own, communication = outside.own(pp), outside.communication(pp)
    exchange = np.zeros_like(own)
    told = context.token_communication(rows)
    outputs = at_last(pp, told.device)
    waits = at_last(pp, sample.wait) + timing.look(own_rows)
    if not timing.decodes_by_graphs:
        waits = waits + at_last(pp, told.wait)
    for kind in context.kinds:
        layer = kind.timing.decode(rows, segment.context * own_rows / rows, context.strategies.cp)
        layer_communication, gathered = kind.layer_communication(rows), kind.output_communication(rows)
        # Exact decode steps send each token to its experts, like a forward pass.
        experts = kind.expert_communication(rows) if timing.exact else kind.gather_communication(rows)
        own = own + kind.counts * layer.device
        communication = communication + kind.counts * layer_communication.device
        exchange = exchange + kind.counts * experts.device
        outputs = outputs + kind.counts * gathered.device
        if not timing.decodes_by_graphs:
            parts = layer, layer_communication, gathered, experts
            waited = sum(part.host for part in parts) - sum(part.device for part in parts)
            waits = waits + kind.counts * np.maximum(0.0, waited)
    # Each stage receives once and sends once. The last hop sends the sampled tokens back to the first stage.
    hop = context.hop(rows)
    busy = own + communication + outputs + exchange
    stages = np.where(np.arange(len(own))[:, None] < pp, busy + waits + hop, 0.0)
    slowest = stages.argmax(axis=0), np.arange(len(pp))
    return {
        "decode": batches * own[slowest],
        "tensor": batches * communication[slowest],
        "context": batches * outputs[slowest],
        "experts": batches * exchange[slowest],
        "launch": batches * waits[slowest],
        "pipeline": batches * hop,
        "bubble": np.maximum(0.0, stages.sum(axis=0) - batches * stages[slowest]),
    }
