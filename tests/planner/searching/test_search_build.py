"""Problems built from models, a cluster and a workload."""

import random
from dataclasses import replace

import numpy as np
import pytest

from realrl.algorithms.ppo import ALGORITHM as PPO_SPEC
from realrl.algorithms.ppo import train_graph
from realrl.algorithms.sft import train_graph as sft_graph
from realrl.dataflow.call import Kind
from realrl.families.sizes import SHAPES
from realrl.layout.kv_blocks import BLOCK_TOKENS
from realrl.plan.placement import Mesh, Placement, Strategy
from realrl.plan.presets import make_plan
from realrl.planner.cluster.cluster_spec import ClusterSpec
from realrl.planner.cost.cost_model import CostModel
from realrl.planner.memory.call_memory import MemoryModel
from realrl.planner.search.many_plans import Timeline
from realrl.planner.search.plan_search import UserConstraints, find_plan
from realrl.planner.search.search import SearchBudget, search_plans
from realrl.planner.simulate.scenario import Scenario
from realrl.planner.space.build import SearchSpace, build_problem, list_meshes, list_micro_batches
from realrl.planner.space.problem import Problem
from realrl.planner.workload.workload import Workload
from realrl.program.memory import StoredModel
from tests.planner.searching.test_search import check_against_all_plans

GRAPH = train_graph(minibatches=4)
SHAPE = SHAPES["llama-2-7b"]
MODELS = dict.fromkeys(GRAPH.roles, SHAPE)
PRESETS = ("heuristic", "symmetric")


def scenario(spec: ClusterSpec) -> Scenario:
    models = {
        role: StoredModel(SHAPE, PPO_SPEC.heads[role], "bfloat16", GRAPH.trained(role))
        for role in GRAPH.roles
    }
    workload = Workload(256, (512,), (512,), 512)
    return Scenario(
        graph=GRAPH,
        models=models,
        spec=spec,
        workload=workload,
        cost=CostModel(spec),
        memory=MemoryModel(spec),
    )


def problem(spec: ClusterSpec, **search_space: object) -> Problem:
    plans = [make_plan(name, GRAPH, spec.cluster, 8192, MODELS) for name in PRESETS]
    return build_problem(scenario(spec), search_space=SearchSpace(**search_space), include=plans)


@pytest.fixture(scope="module")
def built() -> Problem:
    return problem(ClusterSpec.parse("a100-80g:2x4"))


def test_a_searched_plan_is_a_valid_plan(built: Problem) -> None:
    result = search_plans(built, budget=SearchBudget(plans=0, chains=64, rounds=50, nodes=100_000))
    built.plan(result.assignment).check(GRAPH, MODELS)
    assert result.evaluation.fits


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_among_the_candidates_and_no_better_than_the_search(built: Problem, name: str) -> None:
    result = search_plans(built, budget=SearchBudget(plans=0, chains=64, rounds=50, nodes=100_000))
    assignment = built.find_assignment(make_plan(name, GRAPH, built.cluster, 8192, MODELS))
    assert assignment is not None
    preset = Timeline(built).evaluate(assignment)
    assert not preset.fits or preset.seconds >= result.evaluation.seconds >= result.lower_bound


@pytest.mark.parametrize("seed", range(8))
def test_the_search_finds_the_best_of_sampled_real_candidates(seed: int) -> None:
    rng = random.Random(seed)
    full = problem(ClusterSpec.parse(rng.choice(["h200:1x4", "a100-80g:2x2", "a100-80g:1x8", "b200:2x4"])))
    candidates = {
        name: tuple(rng.sample(given, min(3, len(given)))) for name, given in full.candidates.items()
    }
    check_against_all_plans(replace(full, candidates=candidates))


def test_only_homes_decide_what_is_offloaded(built: Problem) -> None:
    offloading = {name for name, candidates in built.candidates.items() if any(o.offload for o in candidates)}
    assert offloading <= {built.home(role).name for role in GRAPH.roles}


def test_without_offloading_no_candidate_offloads() -> None:
    plain = problem(ClusterSpec.parse("a100-80g:1x4"), offload=False, recompute=(True,))
    preset = {make_plan(name, GRAPH, plain.cluster, 8192, MODELS)["actor.train"] for name in PRESETS}
    for candidates in plain.candidates.values():
        assert not any(o.offload or o.offload_optimizer for o in candidates if o.placement not in preset)


@pytest.mark.parametrize("text", ["a100-80g:3x8", "a100-80g:40x8", "a100-80g:2x8+h100:3x8"])
def test_candidate_meshes_lie_on_homogeneous_nodes_of_the_cluster(text: str) -> None:
    spec = ClusterSpec.parse(text)
    found = list_meshes(spec)
    for mesh in found:
        mesh.check(spec.cluster)
        assert spec.site(mesh).nodes.size == mesh.size
    assert len(found) == len(set(found))
    assert max(mesh.size for mesh in found) == max(group.size for group in spec.groups)


@pytest.mark.parametrize("items", [1, 64, 4096])
@pytest.mark.parametrize("name", ["actor.generate", "ref.inference", "actor.train"])
def test_micro_batches_range_from_one_sequence_to_the_whole_mini_batch(name: str, items: int) -> None:
    call, step = GRAPH.call(name), Workload(4 * items, (100, 300), (50,), 80)
    work = step.work(call)
    sizes = list_micro_batches(call.kind, work)
    unit = BLOCK_TOKENS if call.kind is Kind.GENERATE else 1
    longest = sum(-(-tokens // unit) * unit for tokens in (max(work.lengths), work.room))
    whole = work.sequences // work.minibatches * longest
    assert list(sizes) == sorted(set(sizes)) and max(work.lengths) <= sizes[0]
    assert sizes[-1] <= whole and (
        sizes[-1] == whole or (call.kind is not Kind.GENERATE and sizes[-1] >= 8192)
    )


@pytest.mark.parametrize(
    ("longest", "degrees", "generating"),
    [(4095, {1}, {1}), (4096, {1, 2}, {1}), (40_000, {1, 2, 4, 8}, {1, 2, 4})],
)
def test_long_sequences_are_divided(longest: int, degrees: set[int], generating: set[int]) -> None:
    """Generation divides them only if their caches are large. One of 40,000 tokens takes 20 GB."""
    of = replace(
        scenario(ClusterSpec.parse("h100:1x8")), workload=Workload(256, (96,), (longest - 96,), longest - 96)
    )
    candidates = build_problem(of, search_space=SearchSpace(recompute=(True,), offload=False)).candidates
    for call in GRAPH.calls:
        found = {candidate.placement.strategy.cp for candidate in candidates[call.name]}
        assert found == (generating if call.kind is Kind.GENERATE else degrees), call.name


def test_small_micro_batches_are_tried_where_nothing_else_fits() -> None:
    given = ClusterSpec.parse("a100-80g:1x1")
    graph = sft_graph()
    call, model = graph.calls[0], StoredModel(SHAPES["llama-2-7b"], "lm", "bfloat16", True)
    workload = Workload(64, (128,))
    needs = {}
    for tokens in (128, 2048):
        strategy = Strategy(micro_batch_tokens=tokens, recompute=True)
        place = Placement(Mesh(0, 1), strategy)
        needs[tokens] = MemoryModel(given).call(call, model, place, workload).bytes
    taken = given.device(0).memory_bytes - MemoryModel(given).capacity(0)
    (group,) = given.groups
    device = replace(group.device, memory_bytes=taken + (needs[128] + needs[2048]) // 2)
    spec = replace(given, groups=(replace(group, device=device),))
    of = Scenario(
        graph=graph,
        models={"actor": model},
        spec=spec,
        workload=workload,
        cost=CostModel(spec),
        memory=MemoryModel(spec),
    )
    lean = UserConstraints(search_space=SearchSpace(offload=False))
    found = find_plan(of, effort=100_000, presets={}, constraints=lean)
    assert found.plan["actor.train"].strategy.micro_batch_tokens == 128


def test_only_training_and_inference_in_its_layouts_interleave_if_this_saves_time() -> None:
    of = scenario(ClusterSpec.parse("a100-80g:4x8"))
    of = replace(of, workload=Workload(64, (4096,), (4096,), 4096))
    lean = SearchSpace(recompute=(False,), offload=False, keep=False, zero_bubble=(False,))
    found = build_problem(of, search_space=lean).candidates
    strategies = {name: [one.placement.strategy for one in candidates] for name, candidates in found.items()}
    turned = {name: {s for s in some if s.vpp > 1} for name, some in strategies.items()}
    assert turned["actor.train"] and not turned["actor.generate"]
    assert all(s.pp > 1 and s.zero == 1 and s.pp * s.vpp <= SHAPE.layers for s in turned["actor.train"])
    layouts = {s.all_degrees for s in turned["critic.train"]}
    assert {s.all_degrees for s in turned["critic.inference"]} <= layouts
    least = {
        vpp: min(one.seconds for one in found["actor.train"] if (one.placement.strategy.vpp > 1) == (vpp > 1))
        for vpp in (1, 2)
    }
    assert least[2] < least[1]
    without = build_problem(of, search_space=replace(lean, virtual=(1,))).candidates
    assert all(one.placement.strategy.vpp == 1 for some in without.values() for one in some)
    for name, candidates in found.items():
        plain = {one for one in candidates if one.placement.strategy.vpp == 1}
        assert plain == set(without[name])


def test_training_has_zero_bubbles_if_they_save_time() -> None:
    of = scenario(ClusterSpec.parse("a100-80g:4x8"))
    of = replace(of, workload=Workload(64, (4096,), (4096,), 4096))
    lean = SearchSpace(recompute=(False,), offload=False, keep=False, virtual=(1,))
    found = build_problem(of, search_space=lean).candidates
    filled = {
        name: [one for one in some if one.placement.strategy.zero_bubble] for name, some in found.items()
    }
    assert {name for name, some in filled.items() if some} == {"actor.train", "critic.train"}
    plain = {one.placement: one.seconds for one in found["actor.train"]}
    for one in filled["actor.train"]:
        strategy = replace(one.placement.strategy, zero_bubble=False)
        assert strategy.pp > 1 and strategy.zero == 1
        assert one.seconds < plain.get(replace(one.placement, strategy=strategy), np.inf)
    without = build_problem(of, search_space=replace(lean, zero_bubble=(False,))).candidates
    for name, candidates in found.items():
        # Ways without a zero bubble may be dominated by such with one.
        assert {one for one in candidates if one not in filled[name]} <= set(without[name])
