"""Predictions of steps that hand on their samples in portions."""

import random
from dataclasses import replace
from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realrl.config.errors import UserError
from realrl.dataflow.asynchrony import hand_on_portions, overlap_all
from realrl.dataflow.graph import DataflowGraph
from realrl.plan.cluster import Cluster
from realrl.plan.placement import Mesh, Placement, Strategy
from realrl.plan.plan import Plan
from realrl.planner.cluster.cluster_spec import ClusterSpec
from realrl.planner.cost.cost_model import CostModel
from realrl.planner.memory.call_memory import MemoryModel
from realrl.planner.report.make import compare_staleness
from realrl.planner.search.plan_search import UserConstraints, estimate_found, find_best_plan, find_plan
from realrl.planner.simulate.durations import Durations
from realrl.planner.simulate.estimator import estimate_plan
from realrl.planner.simulate.scenario import Scenario
from realrl.planner.uncertainty.sampled_steps import Draws, sample_step
from realrl.planner.workload.workload import Workload, expect_longest, quantiles
from realrl.program.instructions import Run
from realrl.recipe.training import AsynchronyConfig
from tests.planner.problems import GRAPH, SMALL, stored

ITEMS, SAMPLES, LIMIT = 512, 8, 2048
SPEC = ClusterSpec.parse("a100-80g:1x8")
CHANCE = random.Random(3)
LENGTHS = [min(LIMIT, 1 + int(CHANCE.expovariate(1 / 300))) for _ in range(1 << 13)]
WORK = Workload(
    ITEMS, (256,), quantiles(LENGTHS), LIMIT, samples=SAMPLES, longest=expect_longest(LENGTHS, ITEMS)
)


def draft(portions: int, workload: Workload = WORK) -> Scenario:
    """GRPO of a 7B model without a function."""
    calls = [replace(c, minibatches=1) for c in GRAPH.calls if c.role in ("actor", "ref")]
    calls = [replace(c, inputs=("sequences",)) if c.name == "actor.train" else c for c in calls]
    used = {key for call in calls for key in (*call.inputs, *call.outputs)}
    graph = DataflowGraph(calls, [key for key in GRAPH.keys.values() if key.name in used])
    return Scenario(
        graph=hand_on_portions(graph, portions),
        models={"actor": stored(SMALL), "ref": replace(stored(SMALL), trained=False)},
        spec=SPEC,
        workload=workload,
        cost=CostModel(SPEC),
        memory=MemoryModel(SPEC),
    )


def apart(scenario: Scenario) -> Plan:
    sampling = Placement(Mesh(4, 4), Strategy(dp=4, micro_batch_tokens=400_000))
    others = Placement(Mesh(0, 4), Strategy(dp=4, micro_batch_tokens=16384, zero=3))
    placements = {
        call.name: sampling if call.name == "actor.generate" else others for call in scenario.graph.calls
    }
    return Plan(Cluster(1, 8), placements, keep=("actor",))


def share(scenario: Scenario) -> list[float]:
    """Shares of the time of sampling in which each portion is sampled."""
    call, plan = scenario.graph.call("actor.generate"), apart(scenario)
    return scenario.cost.portions(call, scenario.models["actor"], plan[call.name], scenario.workload)


def test_portions_have_all_prompts_and_tokens_together() -> None:
    for portions in (2, 3, 8):
        parts = [WORK.portion(number, portions) for number in range(1, portions + 1)]
        assert sum(part.items for part in parts) == ITEMS
        tokens = sum(part.items * mean(part.answers) for part in parts)
        assert tokens == pytest.approx(ITEMS * mean(WORK.answers), rel=0.01)
        longest = [max(part.answers) for part in parts]
        assert longest == sorted(longest)


def test_portions_are_those_of_drawn_answers() -> None:
    chance, portions = random.Random(7), 4
    drawn: list[list[float]] = [[] for _ in range(portions)]
    for _ in range(60):
        prompts = [chance.choices(LENGTHS, k=SAMPLES) for _ in range(ITEMS // SAMPLES)]
        prompts.sort(key=max)
        each = len(prompts) // portions
        for number in range(portions):
            drawn[number].append(
                mean(n for prompt in prompts[number * each : (number + 1) * each] for n in prompt)
            )
    for number in range(portions):
        found = mean(WORK.portion(number + 1, portions).answers)
        assert found == pytest.approx(mean(drawn[number]), rel=0.05)


def test_a_call_takes_as_long_in_portions_as_in_one_piece_or_a_little_longer() -> None:
    whole, cut = draft(1), draft(4)
    plan = apart(whole)
    one, parts = Durations(whole, plan), Durations(cut, plan)
    for call in whole.graph.calls:
        together = sum(sum(parts.terms(call.name, portion).values()) for portion in (1, 2, 3, 4))
        assert sum(parts.terms(call.name).values()) == pytest.approx(together)
        alone = sum(one.terms(call.name).values())
        assert alone * 0.98 <= together <= alone * 1.25, call.name
    assert "optimizer" not in parts.terms("actor.train", 1)
    assert parts.terms("actor.train", 4)["optimizer"] == pytest.approx(one.terms("actor.train")["optimizer"])


def test_later_portions_end_later_and_the_first_ends_early() -> None:
    scenario = draft(8)
    shares = share(scenario)
    assert len(shares) == 8 and all(share > 0 for share in shares) and sum(shares) == pytest.approx(1)
    # The last prompts wait for the longest answers.
    assert shares[-1] > 2 * min(shares) and shares[0] < 0.6
    alike = draft(4, replace(WORK, answers=(500,), longest=500))
    # Answers of one length end together.
    assert share(alike)[0] > 0.8


def test_inference_and_training_overlap_with_sampling() -> None:
    whole, cut = draft(1), draft(8)
    plan = apart(whole)
    before, after = estimate_plan(whole, plan), estimate_plan(cut, plan)
    calls = after.calls
    assert after.step_seconds < 0.9 * before.step_seconds
    assert after.step_seconds >= calls["actor.generate"].end - 1e-9
    assert calls["ref.inference"].start < calls["actor.generate"].end < calls["actor.train"].end
    assert calls["actor.train"].seconds > 0 and after.memory == before.memory
    runs = [s.instruction for s in after.slices[0] if isinstance(s.instruction, Run)]
    assert [run.portion for run in runs if run.call == "actor.train"] == [*range(1, 9)]
    # Samples without errors are predictions.
    samples = sample_step(cut, plan, Draws(count=4))
    assert samples.step.mean() == pytest.approx(after.step_seconds, rel=0.5)


def test_plans_keep_sampling_apart() -> None:
    scenario = draft(8)
    found = find_plan(scenario, effort=0.1)
    estimate, gap = estimate_found(scenario, found)
    mesh = estimate.plan["actor.generate"].mesh
    assert not any(
        estimate.plan[call.name].mesh.overlaps(mesh)
        for call in scenario.graph.calls
        if call.name != "actor.generate"
    )
    assert not estimate.plan.offload_optimizer
    # The search lets all calls overlap, so its bound holds for steps with portions.
    assert found.result.lower_bound <= estimate.step_seconds
    assert gap == pytest.approx(1 - found.result.lower_bound / estimate.step_seconds)
    best = find_best_plan(scenario, effort=0.1)
    assert best.estimate.step_seconds <= estimate.step_seconds * 1.06 and 0 <= best.gap < 1
    assert isinstance(best.presets["symmetric"], UserError)
    assert "they need different devices" in str(best.presets["symmetric"])


def test_portions_are_compared_with_whole_batches() -> None:
    scenarios = [(AsynchronyConfig(portions=portions), draft(portions)) for portions in (1, 8)]
    rows = compare_staleness(scenarios, effort=0.1, seed=0, constraints=UserConstraints())
    assert all(row.estimate is not None for row in rows)
    one = replace(draft(8), spec=ClusterSpec.parse("a100-80g:1x1"))
    one = replace(one, cost=CostModel(one.spec), memory=MemoryModel(one.spec))
    both = [scenarios[0], (AsynchronyConfig(portions=8), one)]
    _, refused = compare_staleness(both, effort=0.1, seed=0, constraints=UserConstraints())
    assert refused.estimate is None and "there is only one device" in str(refused.refused)


@given(
    st.lists(st.integers(1, 2048), min_size=8, max_size=8),
    st.sampled_from([2, 3, 8]),
    st.sampled_from([(1, 3), (2, 2), (4, 4)]),
)
@settings(max_examples=40, deadline=None)
def test_a_step_with_portions_is_not_shorter_than_one_whose_calls_overlap(
    lengths: list[int], portions: int, split: tuple[int, int]
) -> None:
    workload = replace(WORK, answers=tuple(sorted(lengths)), longest=max(lengths))
    cut = draft(portions, workload)
    overlapping = replace(cut, graph=overlap_all(cut.graph))
    reference, training = split
    plan = Plan(
        Cluster(1, 8),
        {
            "actor.generate": Placement(Mesh(4, 4), Strategy(dp=4, micro_batch_tokens=400_000)),
            "ref.inference": Placement(Mesh(0, reference), Strategy(dp=reference, micro_batch_tokens=16384)),
            "actor.train": Placement(
                Mesh(reference if reference + training <= 4 else 0, training),
                Strategy(dp=training, micro_batch_tokens=16384, zero=3 if training > 1 else 1),
            ),
        },
        keep=("actor",),
    )
    sending = 0.02
    relaxed = estimate_plan(overlapping, plan).step_seconds
    assert relaxed <= estimate_plan(cut, plan).step_seconds * (1 + sending)
