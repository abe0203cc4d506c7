"""Times and memory of interleaved pipelines, against a dry run of their schedule."""

import random
from dataclasses import replace

import numpy as np
import pytest

from realrl.engine.pass_schedule import make_schedule
from realrl.families.sizes import SHAPES
from realrl.layout.ranges import virtual_stage_layers
from realrl.plan.placement import Mesh, Placement, Strategy
from realrl.planner.cluster.cluster_spec import ClusterSpec
from realrl.planner.cost.cost_model import CostModel
from realrl.planner.memory.call_memory import MemoryModel
from realrl.planner.workload.stages import Stages
from realrl.planner.workload.strategies import Strategies
from realrl.planner.workload.workload import Workload
from tests.planner.interleaved import count_most, run_actions, run_schedule
from tests.planner.problems import call, stored

SHAPE = SHAPES["llama-3-70b"]
MODEL = CostModel(ClusterSpec.parse("h100:4x8"))
STEP = Workload(64, (512,), (512,), 512)
PIPELINES = [(pp, vpp) for pp in (2, 4, 8) for vpp in (1, 2, 4)]
COUNTS = (1, 2, 3, 5, 8, 13, 16, 19, 23, 24, 33)


def stages_of(pp: int, vpp: int) -> Stages:
    return Stages(np.array([pp]), np.array([vpp]))


def bubble(pp: int, vpp: int, count: int, seconds: list[float]) -> float:
    return float(stages_of(pp, vpp).bubble(np.array([count]), np.array(seconds)[:, None])[0])


@pytest.mark.parametrize(("pp", "vpp"), PIPELINES)
def test_equal_stages_have_the_bubble_of_the_schedule(pp: int, vpp: int) -> None:
    for count in COUNTS:
        step = run_schedule(count, vpp, [1.0] * pp, [2.0] * pp)
        assert 3 * count + bubble(pp, vpp, count, [3.0] * pp) == pytest.approx(step), count


@pytest.mark.parametrize(("pp", "vpp"), PIPELINES)
def test_the_bubble_of_unequal_stages_is_near_that_of_the_schedule(pp: int, vpp: int) -> None:
    rng = random.Random(pp * vpp)
    for count in COUNTS:
        forward = [1 + rng.random() / 2 for _ in range(pp)]
        step = run_schedule(count, vpp, forward, [2 * seconds for seconds in forward])
        whole = [3 * seconds for seconds in forward]
        assert 0.999 < (count * max(whole) + bubble(pp, vpp, count, whole)) / step < 1.13, count


@pytest.mark.parametrize(("pp", "vpp"), PIPELINES)
def test_zero_bubbles_are_those_of_the_schedule(pp: int, vpp: int) -> None:
    """The schedule is made for equal times, and may be longer if stages differ. If micro-batches are fewer than
    stages, some gradients of weights delay others, which the formula ignores."""
    rng = random.Random(pp * vpp)
    for count in COUNTS:
        for spread in (0.0, 0.2):
            actions = make_schedule(pp, count, vpp, splits=True).actions
            seconds = {kind: [1 + rng.random() * spread for _ in range(pp)] for kind in "FBW"}
            step = run_actions(actions, vpp, seconds)
            whole, weights = np.array([*seconds.values()]).sum(axis=0), np.array(seconds["W"])
            found = stages_of(pp, vpp).zero_bubble(np.array([count]), whole[:, None], weights[:, None])
            predicted = count * whole.max() + float(found[0])
            tolerance = 1e-9 if count >= pp and not spread else 0.12
            assert predicted == pytest.approx(step, rel=tolerance), (count, spread)


@pytest.mark.parametrize(("pp", "vpp"), PIPELINES)
def test_forward_passes_take_the_time_of_the_schedule_with_its_messages(pp: int, vpp: int) -> None:
    rng = random.Random(pp * vpp)
    for count in COUNTS:
        for hop in (0.0, 0.01, 0.3):
            forward = [1 + rng.random() / 2 for _ in range(pp)]
            step = run_schedule(count, vpp, forward, hop=hop)
            column, number = np.array(forward)[:, None], np.array([count])
            delay = stages_of(pp, vpp).delay(number, column, np.array([hop]))
            assert count * max(forward) + bubble(pp, vpp, count, forward) + delay == pytest.approx(step)


@pytest.mark.parametrize(("pp", "vpp"), PIPELINES)
def test_training_waits_for_the_messages_of_the_schedule(pp: int, vpp: int) -> None:
    for count in (1, 2, pp, 4 * pp, 16 * pp):
        whole = run_schedule(count, vpp, [1.0] * pp, [2.0] * pp, hop=0.5, waits=True)
        found = (whole - run_schedule(count, vpp, [1.0] * pp, [2.0] * pp)) / 0.5
        waited = int(stages_of(pp, vpp).count_waits(np.array([count]))[0])
        assert found <= waited
        if pp > 2:  # the first and the last of several stages wait for fewer messages than those between
            assert found >= waited - 4 * vpp


@pytest.mark.parametrize("trained", [27, 3])
@pytest.mark.parametrize("layers", [32, 35, 61])
@pytest.mark.parametrize(("pp", "vpp"), PIPELINES)
def test_stages_keep_the_passes_and_layers_of_the_schedule(
    pp: int, vpp: int, layers: int, trained: int
) -> None:
    stages, some = stages_of(pp, vpp), tuple(range(layers - trained, layers))
    for count in COUNTS:
        number = np.array([count])
        passes = stages.count_flying(number)[:, 0]
        kept = stages.count_flying_layers(number, some, layers)[:, 0]
        for stage, runs in enumerate(virtual_stage_layers(layers, pp, vpp)):
            assert passes[stage] == count_most(count, pp, stage, [1] * vpp)
            sizes = [len(set(run) & set(some)) for run in runs]
            assert kept[stage] == count_most(count, pp, stage, sizes)


def test_each_strategy_has_its_own_stages() -> None:
    alike = [Strategy(pp=pp, vpp=vpp) for pp, vpp in ((2, 1), (4, 2), (2, 4), (8, 1), (4, 1))]
    counts = Strategies.of(alike).stages.count_layers(35)
    for column, strategy in zip(counts.T, alike, strict=True):
        runs = virtual_stage_layers(35, strategy.pp, strategy.vpp)
        assert column[: strategy.pp].tolist() == [sum(map(len, own)) for own in runs]
        assert not column[strategy.pp :].any()


def cost(strategy: Strategy, name: str = "actor.train") -> dict[str, float]:
    placement = Placement(Mesh(0, strategy.size), strategy)
    return dict(MODEL.call(call(name), stored(SHAPE), placement, STEP).terms)


@pytest.mark.parametrize("name", ["actor.train", "ref.inference"])
def test_turns_divide_the_bubble_and_change_no_work(name: str) -> None:
    plain = Strategy(dp=1, tp=8, pp=4, micro_batch_tokens=1024)
    whole, turned = cost(plain, name), cost(plain.with_degrees(vpp=4), name)
    assert turned["bubble"] == pytest.approx(whole["bubble"] / 4)
    assert turned["pipeline"] > whole["pipeline"]
    assert turned["compute"] == whole["compute"]
    if name == "actor.train":
        assert sum(turned.values()) < sum(whole.values())


def test_turns_keep_more_activations_on_the_first_stage() -> None:
    model, plain = MemoryModel(MODEL.spec), Strategy(dp=1, tp=8, pp=4, micro_batch_tokens=1024)
    needs = []
    for vpp in (1, 2, 4):
        placement = Placement(Mesh(0, 32), plain.with_degrees(vpp=vpp))
        needs.append(model.stages(call("actor.train"), stored(SHAPE), placement, STEP))
    kept = [need[0].dynamic["activations"] for need in needs]
    # The first stage keeps 4 micro-batches, or 2 * 3 + 4 + 1 passes of half of its layers, or 2 * 3 + 3 * 4 + 1
    # passes of a quarter.
    assert kept[1] / kept[0] == pytest.approx(11 / 2 / 4, rel=0.05)
    assert kept[2] / kept[0] == pytest.approx(19 / 4 / 4, rel=0.05)
    assert {need[3].dynamic["logits"] for need in needs} == {needs[0][3].dynamic["logits"]}


def test_recomputing_turns_keep_only_inputs_of_layers() -> None:
    model, plain = MemoryModel(MODEL.spec), Strategy(dp=1, tp=8, pp=4, vpp=2, micro_batch_tokens=1024)
    found = [
        model.call(call("actor.train"), stored(SHAPE), Placement(Mesh(0, 32), strategy), STEP)
        for strategy in (plain, replace(plain, recompute=True))
    ]
    assert found[1].dynamic["activations"] < 0.5 * found[0].dynamic["activations"]
