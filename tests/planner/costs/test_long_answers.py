"""Predictions of generation whose step ends with a rare long answer."""

import math
import random
from dataclasses import replace
from statistics import mean

import pytest

from realrl.dataflow.call import Call, Kind
from realrl.families.sizes import SHAPES
from realrl.plan.placement import Mesh, Placement, Strategy
from realrl.planner.cluster.cluster_spec import ClusterSpec
from realrl.planner.cost.cost_model import CostModel
from realrl.planner.workload.workload import Workload, expect_longest, quantiles
from realrl.program.memory import StoredModel

GENERATE = Call("actor.generate", "actor", Kind.GENERATE, ("prompts",), work=("prompts",))
MODEL = StoredModel(SHAPES["llama-3.1-8b"], "lm", "bfloat16", trained=True)
COST = CostModel(ClusterSpec.parse("h100:4x8"))
ITEMS, LIMIT, SAMPLES = 1024, 8192, 8


def draw(chance: random.Random, count: int) -> list[int]:
    """Draw lengths of which one in 400 reaches the limit."""
    return [min(LIMIT, max(1, round(math.exp(chance.gauss(6.5, 0.9))))) for _ in range(count)]


def predict(dp: int, tp: int, workload: Workload, call: Call = GENERATE) -> float:
    strategy = Strategy(dp=dp, tp=tp, micro_batch_tokens=300_000)
    return COST.call(call, MODEL, Placement(Mesh(0, dp * tp), strategy), workload).seconds


@pytest.mark.parametrize("dp", [8, 16, 32])
def test_a_step_is_predicted_to_wait_for_its_longest_answer(dp: int) -> None:
    """As long as the slowest of ranks that generate rows of drawn lengths, in the mean over steps."""
    chance, tp = random.Random(dp), 32 // dp
    known = draw(chance, 8192)
    whole = Workload(ITEMS, (512,), quantiles(known), LIMIT, samples=SAMPLES)
    predicted = predict(dp, tp, replace(whole, longest=expect_longest(known, ITEMS)))
    drawn = mean(
        max(
            predict(
                1, tp, replace(whole, items=ITEMS // dp, answers=tuple(sorted(draw(chance, ITEMS // dp))))
            )
            for _ in range(dp)
        )
        for _ in range(3)
    )
    assert predicted == pytest.approx(drawn, rel=0.1)
    assert predict(dp, tp, whole) < 0.9 * drawn  # the sample alone lacks the longest answer


def test_a_part_of_an_answer_is_never_longer_than_the_part() -> None:
    work = Workload(ITEMS, (512,), (100, 200), LIMIT, samples=SAMPLES, longest=8000)
    assert work.work(GENERATE).longest_answer == 8000
    assert work.work(replace(GENERATE, span=4)).longest_answer == LIMIT // 4
    assert replace(work, longest=300).work(replace(GENERATE, span=4)).longest_answer == 300
