"""How much more the busiest data-parallel rank computes than the others in the mean."""

import random
from dataclasses import replace
from itertools import product
from statistics import fmean

import pytest

from realrl.data.balance import partition, partition_shared
from realrl.dataflow.call import Call, Kind
from realrl.families.sizes import SHAPES, estimate_attention_cost
from realrl.plan.placement import Mesh, Placement, Strategy
from realrl.planner.cluster.cluster_spec import ClusterSpec
from realrl.planner.cost.cost_model import CostModel
from realrl.planner.workload.batching import find_load
from realrl.planner.workload.flops import count_flops
from realrl.planner.workload.imbalance import Imbalance, find_imbalance
from realrl.planner.workload.workload import Workload, expect_longest, quantiles
from realrl.program.memory import StoredModel

TRAIN = Call("actor.train", "actor", Kind.TRAIN, ("tokens",), work=("tokens",))
ATTENTION = estimate_attention_cost(SHAPES["qwen2.5-7b"])


def draw(count: int, seed: int, *, sigma: float = 1.2) -> list[int]:
    """Draw lengths with a long tail."""
    rng = random.Random(seed)
    return [min(32768, max(8, round(rng.lognormvariate(7, sigma)))) for _ in range(count)]


def estimate_time(tokens: float, squares: float) -> float:
    return tokens + ATTENTION * squares


@pytest.mark.parametrize("sigma", [0.6, 1.2])
@pytest.mark.parametrize(("records", "ranks"), product((64, 256, 2048), (2, 8, 32, 64)))
def test_a_typical_mini_batch_is_as_uneven_as_drawn_ones(records: int, ranks: int, sigma: float) -> None:
    many = draw(20_000, 0, sigma=sigma)
    mean, mean_square = fmean(many), fmean(n * n for n in many)
    found = []
    for seed in range(1, 41):
        costs = [round(estimate_time(n, n * n)) for n in draw(records, seed, sigma=sigma)]
        found.append(max(sum(costs[i] for i in part) for part in partition(costs, ranks)))
    counted = fmean(found) * ranks / records / estimate_time(mean, mean_square)
    exact = find_imbalance(tuple(sorted(many)), records, ranks, attention_cost=ATTENTION)
    assert estimate_time(exact.tokens * mean, exact.squares * mean_square) == pytest.approx(
        counted * estimate_time(mean, mean_square), rel=0.2
    )
    # A sample of few lengths lacks the longest ones, which are given separately.
    step = Workload(4 * records, (100,), quantiles(many), 32768, longest=expect_longest(many, 4 * records))
    call = replace(TRAIN, minibatches=4)
    load = find_load(step.work(call), Strategy(dp=ranks, micro_batch_tokens=1 << 20), ATTENTION)
    predicted = estimate_time(load.tokens * load.busiest.tokens, load.squares * load.busiest.squares)
    assert predicted / estimate_time(load.tokens, load.squares) == pytest.approx(counted, rel=0.35)


def test_equal_lengths_differ_by_whole_records() -> None:
    assert find_imbalance((100,), 12, 4, attention_cost=ATTENTION) == Imbalance(1, 1)
    assert find_imbalance((100,), 10, 4, attention_cost=ATTENTION) == Imbalance(1.2, 1.2)
    # Three prompts of eight samples: whole prompts leave one of two ranks with one prompt.
    assert find_imbalance((100,), 24, 2, attention_cost=ATTENTION, run=8) == Imbalance(4 / 3, 4 / 3)


def test_a_long_record_keeps_a_rank_busy() -> None:
    lengths = (100,) * 15 + (6000,)
    found = find_imbalance(lengths, 16, 4, attention_cost=0.0)
    assert found.tokens == 6000 * 4 / 7500
    # Runs of several records are divided together.
    costs = [100] * 15 + [6000]
    parts = partition_shared(costs, 4, [0] * 16, [i // 4 for i in range(16)])
    assert max(sum(costs[i] for i in part) for part in parts) == 6000
    assert find_imbalance(lengths, 16, 4, attention_cost=0.0, run=4).tokens == 6300 * 4 / 7500


def test_attention_counts() -> None:
    """The rank with a long sequence gets fewer tokens, because it attends more."""
    lengths = (*[1000] * 25, 20000)
    found = find_imbalance(lengths, 26, 2, attention_cost=ATTENTION)
    assert found.tokens == 20000 * 2 / 45000
    assert found.squares == pytest.approx(2, rel=0.07)
    assert find_imbalance(lengths, 26, 2, attention_cost=0.0).tokens == pytest.approx(1, abs=0.03)


def test_time_and_not_flops_grow_with_imbalance() -> None:
    model = StoredModel(SHAPES["qwen2.5-7b"], "lm", "bfloat16", trained=True)
    cost = CostModel(ClusterSpec.parse("h100:2x8"))
    lengths = tuple([800] * 60 + [32768] * 4)
    work = Workload(64, lengths)

    def predict(**degrees: int) -> float:
        strategy = Strategy(**degrees, micro_batch_tokens=1 << 19, zero=3)
        place = Placement(Mesh(0, 16), strategy)
        return cost.call(TRAIN, model, place, work).terms["compute"]

    # Four ranks of 16 have a long sequence each, which is divided if ranks are a pool.
    assert predict(dp=16) > 2.5 * predict(dp=4, cp=4)
    flops = {
        count_flops(TRAIN, model, work, Strategy(dp=dp, cp=cp, micro_batch_tokens=1 << 19))
        for dp, cp in ((16, 1), (4, 4), (1, 1))
    }
    assert max(flops) == pytest.approx(min(flops))


def test_ranks_of_a_pool_differ() -> None:
    """Five sequences are worth no division among two ranks, of which one has three. Eight ranks divide all of
    them."""
    work = Workload(5, (1000,)).work(TRAIN)
    two, eight = (find_load(work, Strategy(cp=cp, micro_batch_tokens=1 << 20), ATTENTION) for cp in (2, 8))
    assert (two.division.divided, two.division.busiest) == (0, pytest.approx(6 / 5))
    assert (eight.division.divided, eight.division.busiest) == (1, pytest.approx(1))
