"""Agreement of the vectorised evaluation of plans with the simulation of their programs."""

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from realrl.algorithms.ppo import train_graph
from realrl.config.errors import UserError
from realrl.dataflow.asynchrony import run_ahead
from realrl.dataflow.call import Call, Kind, MovingAverage
from realrl.dataflow.graph import DataflowGraph
from realrl.families.adapters import LowRank
from realrl.families.shape import ModelShape
from realrl.families.sizes import SHAPES
from realrl.layout.sets import WHOLE, TrainablePart
from realrl.plan.placement import Mesh, Placement, Strategy, function_placement
from realrl.plan.plan import Plan
from realrl.plan.presets import PRESETS, make_plan
from realrl.planner.cluster.cluster_spec import ClusterSpec
from realrl.planner.cost.cost_model import CostModel
from realrl.planner.memory.call_memory import MemoryModel
from realrl.planner.profile.profile import FunctionTime, Profile
from realrl.planner.search.many_plans import Timeline
from realrl.planner.simulate.estimator import estimate_plan
from realrl.planner.simulate.scenario import Scenario
from realrl.planner.space.build import SearchSpace, build_problem
from realrl.planner.space.problem import Problem
from realrl.planner.workload.workload import Workload
from realrl.program.lower import home_placements, offloaded
from realrl.program.memory import Memory, StoredModel, check_offloading
from tests.conftest import thin
from tests.plan.meshes import list_all
from tests.planner.sampled_graphs import late_lengths, sampled_graph
from tests.rewards import function_reward

SIZES = ("llama-3.2-1b", "llama-2-7b", "llama-2-13b")
MIXTURE = SHAPES["qwen3-30b-a3b"].model_copy(update={"layers": 12})
CLUSTERS = ("l40s:1x2", "l40s:1x8", "a100-40g:2x4", "l40s:2x2+rtx-4090:2x2", "h100:2x8")
UNEVEN = ("h100:1x4+1x2", "l40s:1x4+rtx-4090:1x3", "a100-40g:1x1+1x8+l40s:2x2")


def sampled_scenario(
    rng: random.Random,
    graph: DataflowGraph,
    clusters: Sequence[str] = CLUSTERS,
    mixture: ModelShape | None = None,
) -> Scenario:
    """A step on 2 to 16 devices, of models of which a plan offloads some, and of which some are trained in part."""
    spec = ClusterSpec.parse(rng.choice(clusters))
    source = {average.role: average.source for average in graph.averages}
    shapes = {role: SHAPES[rng.choice(SIZES)] for role in graph.roles}
    if mixture is not None:
        shapes |= {role: mixture for role in graph.roles if graph.trained(role) or rng.random() < 0.5}
    chosen = [
        rng.choice([WHOLE, WHOLE, TrainablePart(last_layers=2), TrainablePart(freeze_embeddings=True)])
        for _ in graph.roles
    ]
    parts = {
        role: part if graph.trained(role) else WHOLE for role, part in zip(graph.roles, chosen, strict=True)
    }
    models = {
        role: StoredModel(
            shapes[source.get(role, role)],
            "scalar" if role in ("critic", "reward") else "lm",
            "float32" if role in source else rng.choice(["bfloat16", "float32"]),
            graph.trained(role),
            parts[source.get(role, role)],
        )
        for role in graph.roles
    }
    workload = Workload(rng.choice([64, 256]), (128,), (100, 300), 400)
    times = [
        FunctionTime(function=str(call.function), seconds=rng.choice([1e-3, 0.1, 1.0]), steps=1)
        for call in graph.functions
    ]
    profile = Profile(device=spec.groups[0].device.name, software={}, functions=tuple(times))
    return Scenario(
        graph=graph,
        models=models,
        spec=spec,
        workload=workload,
        cost=CostModel(spec, profile),
        memory=MemoryModel(spec),
    )


def sampled_choices(rng: random.Random, problem: Problem, most: int) -> list[dict[str, int]]:
    names = [call.name for call in problem.graph.calls]
    return [{name: rng.randrange(len(problem.candidates[name])) for name in names} for _ in range(most)]


@pytest.mark.parametrize(("seed", "graph"), [*((i, None) for i in range(5)), (39, late_lengths())])
def test_search_and_simulation_agree_about_sampled_plans(seed: int, graph: DataflowGraph | None) -> None:
    rng = random.Random(seed)
    of = sampled_scenario(rng, graph or sampled_graph(rng))
    everywhere = Placement(Mesh(0, 2), Strategy(tp=2))
    hosts = function_placement(everywhere.mesh)
    careless = Plan(
        of.spec.cluster, {call.name: hosts if call.is_function else everywhere for call in of.graph.calls}
    )
    space = SearchSpace(dtypes=("bfloat16", "float32"), contexts=(1, 2))
    assert compare(rng, of, build_problem(of, search_space=space, include=[careless]), 25) > 8


@pytest.mark.parametrize("seed", range(4))
def test_search_and_simulation_agree_about_experts_on_ranks_of_their_own(seed: int) -> None:
    rng = random.Random(seed)
    of = sampled_scenario(rng, sampled_graph(rng), ("h100:2x8", "a100-80g:2x4", "h100:1x4+1x2"), MIXTURE)
    space = SearchSpace(contexts=(1, 2), experts=(1, 2, 4, 8))
    problem = build_problem(of, search_space=space)
    assert any(one.placement.strategy.ep > 1 for found in problem.candidates.values() for one in found)
    assert compare(rng, of, problem, 25) > 4


def sampled_placement(rng: random.Random, of: Scenario, call: Call) -> Placement:
    """Any run of devices of one kind, from one node into others or not, under any degrees."""
    runs = list_all(of.spec.cluster)
    mesh = rng.choice([m for m in runs if len({of.spec.device(rank) for rank in m.ranks}) == 1])
    if call.is_function:
        return function_placement(mesh)
    tp = rng.choice([n for n in range(1, min(mesh.size, 8) + 1) if mesh.size % n == 0])
    pp = rng.choice([n for n in range(1, 5) if mesh.size // tp % n == 0])
    copies = mesh.size // tp // pp
    cp = rng.choice([n for n in (1, 2, 3) if copies % n == 0])
    vpp = 1 if call.kind is Kind.GENERATE or pp == 1 else rng.choice((1, 2))
    return Placement(mesh, Strategy(dp=copies // cp, cp=cp, tp=tp, pp=pp, vpp=vpp, sequence_parallel=tp > 1))


@pytest.mark.parametrize("seed", range(4))
def test_search_and_simulation_agree_on_nodes_of_different_size_and_any_meshes(seed: int) -> None:
    rng = random.Random(seed)
    of = sampled_scenario(rng, sampled_graph(rng), UNEVEN)
    plans = [
        Plan(of.spec.cluster, {call.name: sampled_placement(rng, of, call) for call in of.graph.calls})
        for _ in range(20)
    ]
    space = SearchSpace(micro_batch_tokens=()) if rng.random() < 0.5 else SearchSpace(dtypes=("bfloat16",))
    assert compare(rng, of, build_problem(of, search_space=space, include=plans), 20) > 4


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("seed", [*range(4), 39])
def test_search_and_simulation_agree_if_calls_run_ahead(seed: int, steps: int) -> None:
    rng = random.Random(seed)
    of = sampled_scenario(rng, run_ahead(late_lengths() if seed == 39 else sampled_graph(rng), steps))
    # The search lets all ranks end their deliveries together.
    problem = build_problem(of, search_space=SearchSpace(contexts=(1, 2)))
    assert compare(rng, of, problem, 25, tolerance=1e-3) > 3


def compare(rng: random.Random, of: Scenario, problem: Problem, most: int, *, tolerance: float = 1e-9) -> int:
    """Compare both about sampled plans; return how many can be simulated. `tolerance` is that of times."""
    timeline, compared = Timeline(problem), 0
    for assignment in sampled_choices(rng, problem, most):
        plan, found = problem.plan(assignment), timeline.evaluate(assignment)
        try:
            plan.check(of.graph)
        except UserError:  # calls that share parameters under strategies that cannot
            assert found.fill == math.inf
            continue
        compared += 1
        expected = estimate_plan(of, plan)
        fullest = max(device.peak.bytes / device.capacity for device in expected.memory)
        assert found.seconds == pytest.approx(expected.step_seconds, rel=tolerance)
        for name, call in expected.calls.items():
            # Where the optimizer waits in host memory, the search counts bringing it to the call.
            if call.call.kind is not Kind.TRAIN or call.call.role not in plan.offload_optimizer:
                assert found.start[name] == pytest.approx(call.start, rel=tolerance, abs=1e-9)
        fullest = max([fullest, *(host.fill for host in expected.hosts)])
        # The search adds up what is largest on any stage, which need not be on the same one.
        assert fullest * (1 - 1e-9) <= found.fill <= fullest * 1.8
    return compared


def adapted_scenario(rng: random.Random) -> Scenario:
    """PPO whose actor and critic train adapters for one base, which is the reference."""
    of = sampled_scenario(rng, train_graph(minibatches=2))
    shape = SHAPES[rng.choice(SIZES)]
    dtype = rng.choice(["bfloat16", "float32"])
    lora = LowRank(rank=rng.choice([8, 256]), dora=rng.random() < 0.3)
    adapted, part = shape.model_copy(update={"lora": lora}), TrainablePart(adapters=True)
    models = {
        "actor": StoredModel(adapted, "lm", dtype, True, part, base="one"),
        "critic": StoredModel(adapted, "scalar", dtype, True, part, base="one"),
        "ref": StoredModel(shape, "lm", dtype, False, base="one"),
    }
    return replace(of, models={**of.models, **models})


@pytest.mark.parametrize("seed", thin(range(6), 2))
def test_search_and_simulation_agree_where_roles_share_a_base(seed: int) -> None:
    rng = random.Random(seed)
    of = adapted_scenario(rng)
    problem = build_problem(of)
    (sharers,) = problem.sharers
    homes = [problem.home(role).name for role in sharers]
    timeline, fills = Timeline(problem), []
    for assignment in sampled_choices(rng, problem, 40):
        layouts = {problem.candidates[homes[0]][assignment[homes[0]]].layout}
        for name in homes[1:]:
            alike = [i for i, o in enumerate(problem.candidates[name]) if o.layout in layouts]
            if alike and rng.random() < 0.8:
                assignment[name] = rng.choice(alike)
            layouts.add(problem.candidates[name][assignment[name]].layout)
        plan, found = problem.plan(assignment), timeline.evaluate(assignment)
        memory = Memory(of.models, home_placements(of.graph, plan), offloaded(plan), {})
        try:
            plan.check(of.graph)
            check_offloading(plan, memory.holders)
        except UserError:
            assert found.fill == math.inf
            continue
        expected = estimate_plan(of, plan)
        fullest = max(device.peak.bytes / device.capacity for device in expected.memory)
        assert found.seconds == pytest.approx(expected.step_seconds, rel=1e-9)
        assert fullest * (1 - 1e-9) <= found.fill <= fullest * 1.8
        apart = replace(of, models={r: replace(m, base=None) for r, m in of.models.items()})
        twice = max(d.peak.bytes / d.capacity for d in estimate_plan(apart, plan).memory)
        assert fullest <= twice and (memory.holders or fullest == twice)
        fills.append(fullest / twice)
    assert sum(fill < 0.95 for fill in fills) > 1, "no plan has saved a base"


@pytest.mark.parametrize("name", [name for name in PRESETS if name not in ("separate", "openrlhf")])
@pytest.mark.parametrize(("averaging", "reward"), [(None, None), (0.1, None), (None, "judge.py:score")])
def test_search_and_simulation_agree_about_presets(
    name: str, averaging: float | None, reward: str | None
) -> None:
    scored_by = None if reward is None else function_reward(reward)
    averages = [] if averaging is None else [MovingAverage("ref", "actor", averaging)]
    graph = train_graph(minibatches=4, averages=averages, reward=scored_by)
    of = sampled_scenario(random.Random(1), graph)
    of = replace(of, spec=ClusterSpec.parse("a100-80g:2x4"))
    times = (FunctionTime(function="judge.py:score", seconds=0.5, steps=1),)
    profile = Profile(device="a100-80g", software={}, functions=times)
    of = replace(of, cost=CostModel(of.spec, profile), memory=MemoryModel(of.spec))
    shapes = {role: model.shape for role, model in of.models.items()}
    plan = make_plan(name, of.graph, of.spec.cluster, 4096, shapes)
    problem = build_problem(of, include=[plan])
    assignment = problem.find_assignment(plan)
    assert assignment is not None
    found, expected = Timeline(problem).evaluate(assignment), estimate_plan(of, plan)
    assert found.seconds == pytest.approx(expected.step_seconds, rel=1e-9)
    fullest = max(device.peak.bytes / device.capacity for device in expected.memory)
    assert fullest * (1 - 1e-9) <= found.fill <= fullest * 1.6
