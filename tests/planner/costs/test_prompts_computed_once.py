"""Prompts that train and inference calls compute once: what the planner counts is what ranks compute."""

from itertools import product

import pytest
import torch

from realrl.data.balance import assign
from realrl.data.batch import Batch, Ragged
from realrl.dataflow.call import Call, Candidates, Kind
from realrl.engine.host_items import HostItems
from realrl.engine.micro_batches import split_items
from realrl.families.sizes import SHAPES
from realrl.plan.placement import Mesh, Placement, Strategy
from realrl.planner.cluster.cluster_spec import ClusterSpec
from realrl.planner.cost.cost_model import CostModel
from realrl.planner.workload.batching import find_load, split_work
from realrl.planner.workload.flops import count_flops
from realrl.planner.workload.workload import SharedPrompts, Workload
from realrl.program.memory import StoredModel

PROMPT, ANSWER = 24, 16
TRAIN = Call("actor.train", "actor", Kind.TRAIN, ("sequences",), work=("sequences",))


def count_on_ranks(prompts: int, samples: int, strategy: Strategy) -> tuple[int, int]:
    """Largest number of tokens, and sum of squares, that a rank computes of one mini-batch."""
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(0, 1000, (PROMPT,), generator=generator) for _ in range(prompts)]
    rows = [
        torch.cat((text, torch.randint(0, 1000, (ANSWER,), generator=generator)))
        for text in texts
        for _ in range(samples)
    ]
    costs, numbers = [len(row) for row in rows], [i // samples for i in range(len(rows))]
    found = []
    for (items,) in assign(
        costs, minibatches=1, dp=strategy.dp, shared=[PROMPT] * len(rows), prompts=numbers
    ):
        parts = split_items(
            HostItems.of(Ragged.of([rows[i] for i in items]), Batch(tuple(items), {}), ()),
            max_tokens=strategy.micro_batch_tokens,
            stages=strategy.pp,
            shares=True,
            ranks=strategy.cp,
        )
        saved = sum(len(of.rows) - 1 for part in parts for of in part.prefixes)
        squares = len(items) * (PROMPT + ANSWER) ** 2 - saved * PROMPT**2
        found.append((sum(part.tokens for part in parts), squares))
    return max(found)


@pytest.mark.parametrize(
    ("prompts", "samples", "dp", "cp", "pp", "budget"),
    [
        (4, 8, 1, 1, 1, 10_000),
        (4, 8, 2, 1, 1, 10_000),
        (4, 8, 8, 1, 1, 10_000),  # half a prompt's samples on each rank
        (3, 8, 2, 1, 1, 10_000),
        (4, 8, 1, 1, 1, 160),  # four samples in a micro-batch
        (4, 8, 1, 1, 1, 40),  # a single one
        (4, 16, 2, 1, 2, 10_000),
        (6, 1, 3, 1, 1, 10_000),
        # A pool of two or four ranks: each computes the samples of two prompts, or of one.
        (4, 8, 1, 2, 1, 10_000),
        (4, 8, 2, 2, 1, 10_000),
        (4, 8, 1, 4, 1, 640),
        # Sequences that two ranks divide are computed by themselves.
        (4, 8, 1, 2, 1, 40),
    ],
)
def test_planner_counts_what_ranks_compute(
    prompts: int, samples: int, dp: int, cp: int, pp: int, budget: int
) -> None:
    strategy = Strategy(dp=dp, cp=cp, pp=pp, micro_batch_tokens=budget)
    workload = Workload(prompts * samples, (PROMPT,), (ANSWER,), ANSWER, samples=samples)
    load, chunks = find_load(workload.work(TRAIN), strategy), split_work(workload.work(TRAIN), strategy)
    busiest = load.tokens * load.busiest.tokens, load.squares * load.busiest.squares
    assert busiest == pytest.approx(count_on_ranks(prompts, samples, strategy))
    assert (chunks.count * chunks.tokens, chunks.count * chunks.squares) == pytest.approx(busiest)
    # Memory does not rely on what sequences have in common.
    alone = Workload(prompts * samples, (PROMPT,), (ANSWER,), ANSWER, samples=samples, shares_prompts=False)
    assert chunks.peak == split_work(alone.work(TRAIN), strategy).peak


def test_which_calls_share_prompts() -> None:
    workload = Workload(32, (PROMPT,), (ANSWER,), ANSWER, samples=8)
    shared = SharedPrompts(PROMPT, PROMPT**2)
    assert workload.work(TRAIN).shared == shared
    given = Candidates(4, "teacher_ids")
    inputs = ("sequences", "teacher_ids")
    assert (
        workload.work(
            Call("actor.train", "actor", Kind.TRAIN, inputs, work=("sequences",), candidates=given)
        ).shared
        is None
    )
    of_prompts = Call("actor.look", "actor", Kind.INFERENCE, ("prompts",), work=("prompts",))
    assert workload.work(of_prompts).shared is None
    # The planner does not know how much of data without samples is shared.
    assert Workload(32, (PROMPT + ANSWER,)).work(TRAIN).shared is None
    # Two sequences of an item begin with the same prompt.
    pair = Call("reward.train", "reward", Kind.TRAIN, ("chosen", "rejected"), work=("chosen", "rejected"))
    load = find_load(Workload(4, (PROMPT,), (ANSWER,), ANSWER).work(pair), Strategy(micro_batch_tokens=1000))
    assert load.tokens == 8 * (PROMPT + ANSWER) - 4 * PROMPT


def test_short_prompts_are_not_shared() -> None:
    load = find_load(
        Workload(32, (2,), (100,), 100, samples=8).work(TRAIN), Strategy(micro_batch_tokens=9999)
    )
    assert load.tokens == 32 * 102


def test_time_and_flops_fall_with_the_tokens() -> None:
    model = StoredModel(SHAPES["qwen2.5-7b"], "lm", "bfloat16", trained=True)
    spec = ClusterSpec.parse("h100:1x1")
    place = Placement(Mesh(0, 1), Strategy(micro_batch_tokens=1 << 17))
    seconds, flops = {}, {}
    for shares, samples in product((True, False), (1, 16)):
        workload = Workload(256, (3000,), (1000,), 1000, samples=samples, shares_prompts=shares)
        found = CostModel(spec).call(TRAIN, model, place, workload)
        seconds[shares, samples] = sum(found.terms.values())
        flops[shares, samples] = count_flops(TRAIN, model, workload, place.strategy)
    assert seconds[True, 1] == seconds[False, 1] == seconds[False, 16]
    assert flops[True, 1] == flops[False, 1] == flops[False, 16]
    assert 0.25 < flops[True, 16] / flops[False, 16] < 0.32
    assert 0.2 < seconds[True, 16] / seconds[False, 16] < 0.6
