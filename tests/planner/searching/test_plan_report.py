"""Reports of plans: presets, alternatives, and other numbers of nodes."""

import math
import re
from dataclasses import replace

import pytest

from realrl.algorithms.ppo import train_graph
from realrl.config.errors import UserError
from realrl.families.sizes import SHAPES
from realrl.plan.placement import Mesh, Placement, Strategy
from realrl.plan.plan import Plan
from realrl.plan.presets import make_plan
from realrl.planner.cluster.cluster_spec import ClusterSpec
from realrl.planner.cost.cost_model import CostModel
from realrl.planner.memory.call_memory import MemoryModel
from realrl.planner.report.make import make_report
from realrl.planner.report.report import PlanReport, SizeReport
from realrl.planner.report.to_json import report_to_json
from realrl.planner.search.plan_search import UserConstraints, make_preset_plans, tune_plan
from realrl.planner.simulate.estimator import estimate_plan
from realrl.planner.simulate.scenario import Scenario
from realrl.planner.space.build import SearchSpace
from realrl.planner.workload.workload import Workload
from realrl.program.memory import StoredModel

GRAPH = train_graph(minibatches=2)
SHAPE = SHAPES["qwen2.5-0.5b"]
MODELS = {
    role: StoredModel(SHAPE, "lm" if role in ("actor", "ref") else "scalar", "bfloat16", GRAPH.trained(role))
    for role in GRAPH.roles
}
STEP = Workload(64, (256,), (256,), 256)
SHORTAGE = r"device \d+ needs [\d.]+ GiB of [\d.]+ GiB during \w+\.\w+, [\d.]+ GiB of it \w"
"""How pages, tables and error messages alike say that a device is too small."""


def scenario(cluster: str, memory: int | None = None) -> Scenario:
    spec = ClusterSpec.parse(cluster)
    if memory is not None:
        (group,) = spec.groups
        spec = replace(spec, groups=(replace(group, device=replace(group.device, memory_bytes=memory)),))
    return Scenario(
        graph=GRAPH, models=MODELS, spec=spec, workload=STEP, cost=CostModel(spec), memory=MemoryModel(spec)
    )


@pytest.fixture(scope="module")
def report() -> PlanReport:
    return make_report(scenario("a100-40g:2x2"), effort=50_000)


def test_the_chosen_plan_is_valid_and_within_its_bound(report: PlanReport) -> None:
    report.chosen.plan.check(GRAPH, dict.fromkeys(GRAPH.roles, SHAPE))
    assert report.chosen.fits
    assert report.lower_bound_seconds <= report.chosen.step_seconds
    assert 0 <= report.gap < 1


def test_no_preset_that_fits_is_faster(report: PlanReport) -> None:
    found = [preset.estimate for preset in report.presets.values() if preset.estimate]
    assert len(found) == 7
    assert all(e.step_seconds >= report.chosen.step_seconds for e in found if e.fits)


def test_impossible_presets_have_an_error_message() -> None:
    presets = make_report(scenario("a100-40g:1x2"), effort=30_000).presets
    assert presets["disjoint"].estimate is None
    assert "needs at least 4 devices" in str(presets["disjoint"].refused)


def test_presets_are_tuned_in_micro_batches_and_recomputation() -> None:
    ample = scenario("a100-40g:1x2")
    plan = make_plan("symmetric", GRAPH, ample.spec.cluster, 8192)
    plain, leaner = (estimate_plan(ample, p) for p in (plan, plan.recomputing(GRAPH)))
    taken = ample.spec.groups[0].device.memory_bytes - plain.peak_device.capacity
    tight = scenario("a100-40g:1x2", taken + (plain.peak_bytes + leaner.peak_bytes) // 2)
    assert not estimate_plan(tight, plan).fits
    preset = make_report(tight, effort=30_000).presets["symmetric"]
    assert preset.estimate is not None and preset.estimate.fits
    assert preset.estimate.step_seconds <= estimate_plan(tight, plan.recomputing(GRAPH)).step_seconds
    assert preset.recompute == any(p.strategy.recompute for p in preset.estimate.plan.placements.values())


def test_tuning_leaves_memory_for_persistent_replicas() -> None:
    ample = scenario("a100-40g:1x2")
    plan = make_plan("symmetric", GRAPH, ample.spec.cluster, 8192)
    generate = replace(plan["actor.generate"], strategy=Strategy(tp=2, micro_batch_tokens=8192))
    plan = replace(plan, placements={**plan.placements, "actor.generate": generate}, keep=("actor",))
    best = estimate_plan(ample, tune_plan(ample, plan))
    fullest = best.peak_device.peak
    assert fullest.during.endswith(".train")
    (copy,) = (size for part, size in fullest.parts.items() if part.role == "actor" and part.copy is not None)
    taken = ample.spec.groups[0].device.memory_bytes - best.peak_device.capacity
    tight = scenario("a100-40g:1x2", taken + best.peak_bytes - copy // 2)
    assert not estimate_plan(tight, best.plan).fits
    smaller = estimate_plan(tight, tune_plan(tight, plan))
    assert smaller.fits
    assert smaller.step_seconds >= best.step_seconds


def test_alternatives_run_one_call_otherwise_and_are_slower_or_do_not_fit(report: PlanReport) -> None:
    assert {other.call for other in report.alternatives} == {call.name for call in GRAPH.calls}
    for other in report.alternatives:
        assert other.fits == ("slower" in other.reason)
        assert not other.fits or other.step_seconds > report.chosen.step_seconds


def test_no_alternative_offloads_if_offloading_frees_nothing() -> None:
    constraints = UserConstraints(search_space=SearchSpace(offload=False))
    tight = make_report(scenario("a100-40g:1x2", 12 << 30), effort=200_000, constraints=constraints)
    assert tight.alternatives and not any(other.offload for other in tight.alternatives)
    free = make_report(scenario("a100-40g:1x2", 12 << 30), effort=200_000)
    assert any(other.offload or other.on_device for other in free.alternatives)


def test_user_plans_with_meshes_on_heterogeneous_nodes_are_rejected() -> None:
    mixed = scenario("h100:1x2+a100-40g:1x2")
    mesh = Placement(Mesh(0, 4), Strategy(dp=4, micro_batch_tokens=4096))
    mine = Plan(mixed.spec.cluster, {call.name: mesh for call in GRAPH.calls})
    found = make_preset_plans(mixed, UserConstraints(own={"mine.yaml": mine}))["mine.yaml"]
    assert isinstance(found, UserError) and "devices of several kinds (h100 and a100-40g)" in str(found)


def test_step_times_of_alternatives_are_near_their_own_estimates(report: PlanReport) -> None:
    plan = report.chosen.plan
    assert any(other.fits for other in report.alternatives)
    for other in report.alternatives:
        if other.fits and not other.offload:
            changed = replace(plan, placements={**plan.placements, other.call: other.placement})
            seconds = estimate_plan(report.scenario, changed).step_seconds
            assert other.step_seconds == pytest.approx(seconds, rel=0.03)


def test_faster_alternatives_that_do_not_fit_name_their_largest_part() -> None:
    ample = make_report(scenario("a100-40g:1x2"), effort=30_000).chosen
    taken = scenario("a100-40g:1x2").spec.groups[0].device.memory_bytes - ample.peak_device.capacity
    tight = make_report(scenario("a100-40g:1x2", taken + int(0.8 * ample.peak_bytes)), effort=30_000)
    reasons = [other.reason for other in tight.alternatives if not other.fits]
    assert reasons and all(re.match(SHORTAGE, reason) for reason in reasons)


def test_json_holds_the_numbers_of_the_report(report: PlanReport) -> None:
    found = report_to_json(report)
    assert found["step_seconds"] == report.chosen.step_seconds
    assert found["reallocations"] == [] or found["reallocations"][0]["seconds"] > 0
    assert sum(found["memory"]["parts"].values()) == found["peak_bytes"]


def test_sizes_without_a_plan_have_infinite_cost_at_any_price() -> None:
    sizes = [
        SizeReport(
            cluster="l40s:1x8",
            kind="l40s",
            nodes=1,
            devices=8,
            estimate=None,
            gap=None,
            refused="needs more",
            price_per_hour=0.0,
        ),
        SizeReport(
            cluster="l40s:2x8",
            kind="l40s",
            nodes=2,
            devices=16,
            estimate=None,
            gap=None,
            refused="needs more",
            price_per_hour=8.0,
        ),
    ]
    assert all(size.cost == math.inf for size in sizes)


def test_sizes_are_compared_and_the_fastest_is_planned() -> None:
    found = make_report(scenario("a100-40g:1x2"), effort=30_000, nodes=[1, 2])
    assert [size.nodes for size in found.sizes] == [1, 2]
    assert found.scenario.spec.nodes == 2
    assert found.sizes[1].estimate is found.chosen
    one, two = found.sizes
    assert one.device_hours == pytest.approx(one.step_seconds * 2 / 3600, rel=0.05)
    assert two.step_seconds < one.step_seconds


@pytest.mark.parametrize("nodes", [1, 2, 3])
def test_the_first_nodes_of_a_heterogeneous_cluster_can_be_planned(nodes: int) -> None:
    found = make_report(scenario("h100:1x2+a100-40g:2x2"), effort=30_000, nodes=[nodes])
    assert found.scenario.spec.size == 2 * nodes
    assert found.scenario.spec.groups[0].device.name == "h100"
