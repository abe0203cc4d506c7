"""Searches that may divide the KV cache of generation among context-parallel ranks."""

from dataclasses import replace

import pytest

from realrl.dataflow.call import Call, Key, Kind
from realrl.dataflow.graph import DataflowGraph
from realrl.families.sizes import SHAPES
from realrl.plan.placement import Mesh, Placement, Strategy
from realrl.plan.plan import Plan
from realrl.planner.cluster.cluster_spec import ClusterSpec
from realrl.planner.cost.cost_model import CostModel
from realrl.planner.memory.call_memory import MemoryModel
from realrl.planner.report.make import make_report
from realrl.planner.report.to_json import report_to_json
from realrl.planner.search.plan_search import find_plan
from realrl.planner.search.search import SearchBudget, search_plans
from realrl.planner.simulate.estimator import estimate_plan
from realrl.planner.simulate.scenario import Scenario
from realrl.planner.space import build
from realrl.planner.space.build import SearchSpace, build_problem
from realrl.planner.space.candidate import count_bytes_alone
from realrl.planner.workload.workload import Workload
from realrl.program.memory import StoredModel
from tests.planner.searching.test_whole_space import PAIR, find_fastest

ALONE = DataflowGraph(
    [Call("a.generate", "a", Kind.GENERATE, ("x",), ("s",), work=("x",))],
    (Key("x", "float32", "own"), Key("s", "float32", "own")),
)
SHAPE = SHAPES["llama-3.2-1b"]
FLAT = SHAPE.model_copy(update={"vocab_size": 1024, "layers": 1, "kv_heads": 1, "head_dim": 256, "heads": 8})
"""Model whose cache no tensor or pipeline parallelism divides: the only layer has a single key head. A token takes
1 KiB."""
MILLION = 1 << 20


def make_scenario(
    graph: DataflowGraph,
    workload: Workload,
    *,
    gibibytes: float,
    model: StoredModel,
    cluster: str = "l40s:1x4",
) -> Scenario:
    spec = ClusterSpec.parse(cluster)
    (group,) = spec.groups
    device = replace(group.device, memory_bytes=int(gibibytes * (1 << 30)))
    spec = replace(spec, groups=(replace(group, device=device),))
    return Scenario(
        graph=graph,
        models={"a": model},
        spec=spec,
        workload=workload,
        cost=CostModel(spec),
        memory=MemoryModel(spec),
    )


def sampler(workload: Workload, gibibytes: float) -> Scenario:
    """A step that only generates."""
    model = StoredModel(FLAT, "lm", "bfloat16", False)
    return make_scenario(ALONE, workload, gibibytes=gibibytes, model=model)


ANSWERS = Workload(4, (1024,), (MILLION,), MILLION)


@pytest.mark.parametrize(("gibibytes", "least"), [(40, 1), (2.6, 1), (2.4, 2)])
def test_an_answer_that_fits_no_device_is_divided(gibibytes: float, least: int) -> None:
    """Of 2.4 GiB, drivers and messages leave 1 GiB for weights, process groups, and an answer's cache of 1 GiB."""
    of = sampler(ANSWERS, gibibytes)
    found = find_plan(of, effort=100_000, presets={})
    assert found.plan["a.generate"].strategy.cp >= least
    found.plan.check(of.graph, {"a": FLAT})
    assert estimate_plan(of, found.plan).fits
    candidates = build_problem(of).candidates["a.generate"]
    fitting = [o for o in candidates if count_bytes_alone(o, is_home=True) <= of.memory.capacity(0)]
    assert min(one.placement.strategy.cp for one in fitting) == least


@pytest.mark.parametrize("gibibytes", [2.35, 2.6, 5, 40])
@pytest.mark.parametrize("items", [1, 4])
def test_the_fastest_of_all_plans_that_generate_is_found_and_bounded(
    gibibytes: float, items: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plans with other degrees of context parallelism, which the search leaves out, are not faster here."""
    of = sampler(replace(ANSWERS, items=items), gibibytes)
    kept = build_problem(of)
    monkeypatch.setattr(build, "drop_dominated", lambda ways: ways)
    result = search_plans(kept, tolerance=0.0, budget=SearchBudget(plans=0))
    fastest = find_fastest(build_problem(of))
    assert result.evaluation.seconds == pytest.approx(fastest, rel=1e-9)
    assert result.lower_bound <= fastest * (1 + 1e-9)
    every = build_problem(of, search_space=SearchSpace(contexts=(1, 2, 4)))
    assert len(every.candidates["a.generate"]) >= len(build_problem(of).candidates["a.generate"])
    assert find_fastest(every) == pytest.approx(fastest, rel=0.01)


@pytest.mark.parametrize("gibibytes", [10, 20])
def test_the_fastest_of_all_plans_that_train_too_is_found_and_bounded(
    gibibytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = StoredModel(SHAPE, "lm", "bfloat16", True)
    of = make_scenario(PAIR, Workload(16, (300,), (4000,), 4000), gibibytes=gibibytes, model=model)
    space = SearchSpace(contexts=(1, 2), recompute=(True,))
    kept = build_problem(of, search_space=space)
    monkeypatch.setattr(build, "drop_dominated", lambda ways: ways)
    everything = build_problem(of, search_space=space)
    for candidates in everything.candidates.values():
        assert {one.placement.strategy.cp for one in candidates} == {1, 2}
    fastest = find_fastest(everything)
    result = search_plans(kept, tolerance=0.0, budget=SearchBudget(plans=0))
    assert result.evaluation.seconds == pytest.approx(fastest, rel=1e-9)
    assert result.lower_bound <= fastest * (1 + 1e-9)


def list_degrees(of: Scenario) -> set[tuple[int, int]]:
    """List the degrees of data and context parallelism of all candidates on four devices."""
    strategies = [one.placement.strategy for one in build_problem(of).candidates["a.generate"]]
    return {(s.dp, s.cp) for s in strategies if s.size == 4}


def test_only_large_or_few_rows_are_divided() -> None:
    many, alone = replace(ANSWERS, items=64), {(1, 1), (2, 1), (4, 1)}
    assert list_degrees(sampler(many, 40)) == alone
    # A row's cache takes 1 GiB: more than an eighth of the usable memory, and then on each of two ranks, too.
    assert list_degrees(sampler(many, 8)) == {*alone, (1, 2), (2, 2)}
    assert list_degrees(sampler(many, 5)) == {*alone, (1, 2), (2, 2), (1, 4)}
    # Two rows leave no work for four data-parallel ranks.
    assert list_degrees(sampler(replace(ANSWERS, items=2), 40)) == {(1, 1), (2, 1), (2, 2)}
    short = Workload(2, (512,), (2048,), 2048)
    assert list_degrees(sampler(short, 40)) == {(1, 1), (2, 1)}


def test_exact_generation_is_not_divided() -> None:
    of = sampler(ANSWERS, 6)
    exact = replace(of, models={"a": replace(of.models["a"], exact=True)})
    for space in (SearchSpace(), SearchSpace(contexts=(1, 2))):
        found = build_problem(exact, search_space=space).candidates["a.generate"]
        assert {one.placement.strategy.cp for one in found} == {1}


def test_reports_compare_with_fewer_context_parallel_ranks() -> None:
    of = sampler(ANSWERS, 2.35)
    report = make_report(of, effort=100_000)
    chosen = report.chosen.plan["a.generate"].strategy
    assert chosen.cp > 1
    others = {other.placement.strategy.cp for other in report.alternatives}
    assert min(others) < chosen.cp
    written = report_to_json(report)
    assert written["plan"]["calls"]["a.generate"]["cp"] == chosen.cp
    assert written["calls"]["a.generate"]["terms"]["context"] > 0


@pytest.mark.parametrize("cp", [2, 4])
def test_simulated_generation_takes_the_predicted_time_and_memory(cp: int) -> None:
    """The call is the whole step."""
    of = sampler(ANSWERS, 40)
    place = Placement(Mesh(0, 4), Strategy(dp=4 // cp, cp=cp, micro_batch_tokens=4 * MILLION))
    found = estimate_plan(of, Plan(of.spec.cluster, {"a.generate": place}))
    cost = of.call_cost(of.graph.call("a.generate"), place)
    assert found.step_seconds == pytest.approx(cost.seconds - cost.captures, rel=1e-3)
    assert cost.terms["context"] > 0
    need = of.memory.call(of.graph.call("a.generate"), of.models["a"], place, of.workload)
    assert sum(found.peak_device.peak.parts.values()) >= need.bytes and found.fits
