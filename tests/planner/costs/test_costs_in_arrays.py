"""Many strategies costed at once, against each of them alone, and groups of ranks against their enumeration."""

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from realrl.dataflow.call import Call
from realrl.families.adapters import LowRank
from realrl.families.sizes import SHAPES
from realrl.layout.sets import WHOLE, TrainablePart
from realrl.plan.placement import Mesh, Placement, Strategy
from realrl.planner.cluster.cluster_spec import ClusterSpec
from realrl.planner.cluster.efficiency import Efficiency
from realrl.planner.cost.cost_model import CostModel
from realrl.planner.cost.network import Network
from realrl.planner.memory.call_memory import MemoryModel
from realrl.planner.simulate.scenario import Scenario
from realrl.planner.space.ways import list_ways
from realrl.planner.workload.strategies import Strategies
from realrl.planner.workload.workload import Workload
from realrl.program.memory import StoredModel
from tests.planner.problems import GRAPH

NAMES = ("llama-2-7b", "llama-3-8b", "qwen2.5-0.5b", "gemma-2-2b", "mixtral-8x7b", "qwen3-0.6b")
CLUSTERS = ("a100-80g:4x8", "h100:2x8", "l40s:2x4", "rtx-4090:2x8", "cpu:1x4", "h200:3x6")


def sampled_strategies(rng: random.Random, spec: ClusterSpec, layers: int) -> list[Strategy]:
    (group,) = spec.groups
    found = []
    while len(found) < 25:
        tp = rng.choice([t for t in range(1, group.devices_per_node + 1) if group.devices_per_node % t == 0])
        size = group.devices_per_node * rng.randint(1, group.nodes)
        pp = rng.choice([p for p in range(1, size // tp + 1) if size // tp % p == 0])
        strategy = Strategy(
            dp=size // tp // pp,
            tp=tp,
            pp=pp,
            micro_batch_tokens=rng.choice([700, 2048, 8192, 65536]),
            sequence_parallel=tp > 1 and rng.random() < 0.7,
            dtype=rng.choice([None, None, "bfloat16"]),
            recompute=rng.random() < 0.5,
        )
        if strategy.dp <= 16 and pp <= layers:
            found.append(strategy)
    return found


def sampled_model(rng: random.Random) -> StoredModel:
    shape, part = SHAPES[rng.choice(NAMES)], rng.choice([WHOLE, WHOLE, TrainablePart(last_layers=2)])
    if shape.mixture is None and rng.random() < 0.3:
        shape = shape.model_copy(update={"lora": LowRank(rank=8, dora=rng.random() < 0.5)})
        part = TrainablePart(adapters=True)
    dtype = rng.choice(["bfloat16", "float32", "mixed"])
    return StoredModel(shape, "lm", dtype, True, part, exact=rng.random() < 0.2)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(12))
def test_many_strategies_cost_what_each_costs_alone(seed: int) -> None:
    rng = random.Random(seed)
    spec, model = ClusterSpec.parse(rng.choice(CLUSTERS)), sampled_model(rng)
    step = Workload(
        64, rng.choice([(128,), (30, 100, 400)]), rng.choice([(100, 300), (400,)]), 400, samples=2
    )
    cost, memory = CostModel(spec), MemoryModel(spec)
    models = dict.fromkeys(GRAPH.roles, model)
    of = Scenario(graph=GRAPH, models=models, spec=spec, workload=step, cost=cost, memory=memory)
    strategies = sampled_strategies(rng, spec, model.shape.layers)
    for name in ("actor.generate", "ref.inference", "actor.train"):
        check_ways(of, GRAPH.call(name), strategies)


def check_ways(of: Scenario, call: Call, strategies: list[Strategy]) -> None:
    model = of.models[call.model_role]
    placements = [Placement(Mesh(0, strategy.size), strategy) for strategy in strategies]
    terms = of.cost.terms(call, model, placements, of.workload)
    ways = list_ways(of, call, placements, shares=False)
    for i, (strategy, placement) in enumerate(zip(strategies, placements, strict=True)):
        alone = of.cost.call(call, model, placement, of.workload)
        assert {name: seconds[i] for name, seconds in terms.items()} == pytest.approx(alone.terms, rel=1e-12)
        assert ways.capture_seconds[i] == pytest.approx(alone.captures, rel=1e-12)
        assert ways.seconds[i] == pytest.approx(alone.seconds - alone.captures, rel=1e-12)
        stages = of.memory.stages(call, model, placement, of.workload)
        assert len(stages) == strategy.pp
        resident = max(stage.static_bytes for stage in stages)
        assert ways.weights_bytes[i] == max(stage.static["parameters"] for stage in stages)
        assert ways.resident_bytes[i] == resident
        assert ways.working_bytes[i] == max(stage.bytes for stage in stages) - resident


@pytest.mark.parametrize("per_node", [4, 6, 8])
@pytest.mark.parametrize("kind", ["tp", "dp", "embedding"])
def test_groups_share_the_network_of_a_node_as_counted_rank_by_rank(kind: str, per_node: int) -> None:
    rng = random.Random(per_node)
    (group,) = ClusterSpec.parse(f"rtx-4090:24x{per_node}").groups
    # Without tables, limits of the devices and latencies, the seconds of a ring tell how many share a network.
    device = replace(group.device, link_bytes_per_s=1e15, link_latency_s=0.0, node_latency_s=0.0)
    spec = ClusterSpec("nodes", (replace(group, device=device, node_bytes_per_s=1e9),))
    for _ in range(40):
        tp = rng.choice([1, 2, 3, 4, 8, 16])
        dp, pp = rng.randint(1, 12), rng.randint(1, 9)
        size = dp * tp * pp
        if size > spec.size:
            continue
        placement = Placement(Mesh(0, size), Strategy(dp=dp, tp=tp, pp=pp))
        stages = {0: None, pp - 1: None}
        members = {
            "tp": [
                [placement.rank(dp=d, tp=t, pp=p) for t in range(tp)] for d in range(dp) for p in range(pp)
            ],
            "dp": [
                [placement.rank(dp=d, tp=t, pp=p) for d in range(dp)] for t in range(tp) for p in range(pp)
            ],
            "embedding": [
                [placement.rank(dp=d, tp=t, pp=p) for p in stages] for d in range(dp) for t in range(tp)
            ],
        }[kind]
        nodes = [{rank // per_node for rank in ranks} for ranks in members]
        through = Counter(node for spanned in nodes if len(spanned) > 1 for node in spanned)
        network = Network(
            (spec.site(placement.mesh),), Strategies.of([placement.strategy]), Efficiency(link=1.0)
        )
        ring = {
            "tp": network.group("tp"),
            "dp": network.group("dp"),
            "embedding": network.group("embedding"),
        }[kind]
        assert ring.size[0] == len(members[0]) and ring.nodes[0] == max(map(len, nodes))
        shared = 1e9 / max(through.values()) if through else 1e15
        assert ring.bytes_per_s[0] == pytest.approx(shared)


def test_the_most_ranks_of_a_node_that_send_to_the_next_stage_are_counted_rank_by_rank() -> None:
    rng = random.Random(0)
    (group,) = ClusterSpec.parse("rtx-4090:24x8").groups
    device = replace(group.device, link_bytes_per_s=1e15, node_latency_s=0.0)
    spec = ClusterSpec("nodes", (replace(group, device=device, node_bytes_per_s=1e9),))
    for _ in range(40):
        nodes = rng.randint(2, 12)
        tp = rng.choice([1, 2, 4, 8])
        pp = rng.choice([p for p in range(2, 8 * nodes // tp + 1) if 8 * nodes // tp % p == 0])
        step = 8 * nodes // pp
        leaving = Counter(r // 8 for r in range(8 * nodes - step) if r // 8 != (r + step) // 8)
        strategies = Strategies.of([Strategy(dp=step // tp, tp=tp, pp=pp)])
        seconds = Network((spec.site(Mesh(0, 8 * nodes)),), strategies, Efficiency(link=1.0)).hop(
            np.array([1e9])
        )
        assert seconds[0] == pytest.approx(max(leaving.values()))
