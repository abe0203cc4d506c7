"""Models, recipes and plans that `reality.py` runs."""

from collections.abc import Mapping
from typing import Any

from realrl.dataflow.graph import DataflowGraph
from realrl.plan.cluster import Cluster
from realrl.plan.placement import Mesh, Placement, Strategy
from realrl.plan.plan import Plan
from realrl.plan.presets import make_plan

CLUSTER = Cluster(1, 2)
VOCABULARY, BUDGET = 2048, 2048
SIZES: dict[str, dict[str, Any]] = {
    "small": {"hidden_size": 128, "intermediate_size": 384, "layers": 4, "heads": 4, "kv_heads": 4},
    "medium": {"hidden_size": 256, "intermediate_size": 768, "layers": 4, "heads": 8, "kv_heads": 4},
    "large": {"hidden_size": 384, "intermediate_size": 1024, "layers": 6, "heads": 6, "kv_heads": 6},
    "windows": {
        "family": "gemma2",
        **{"hidden_size": 128, "intermediate_size": 384, "layers": 4, "heads": 4, "kv_heads": 2},
        **{"window": 32, "windowed_layers": [0, 2]},
    },
    "experts": {
        "family": "qwen3_moe",
        **{"hidden_size": 128, "intermediate_size": 128, "layers": 4, "heads": 4, "kv_heads": 2},
        "mixture": {"experts": 16, "per_token": 4},
    },
}
"""Actor and reference; critic and reward model have half the layers. `windows` is a small Gemma 2, half of whose
layers see an eighth of the longest sequences, `experts` a small Qwen3-MoE."""
LENGTHS = {"windows": (32, 224)}
"""Tokens of prompts and of answers, where they are not the usual ones."""
USUAL_LENGTHS = 24, 40


def place(mesh: str, dp: int = 1, tp: int = 1, pp: int = 1, **options: Any) -> Placement:
    """A placement with the bench's micro-batches."""
    strategy = Strategy(dp=dp, tp=tp, pp=pp, **{"micro_batch_tokens": BUDGET, **options})
    return Placement(Mesh.parse(mesh), strategy)


def plan(
    graph: DataflowGraph,
    default: Placement,
    offload: str = "",
    offload_optimizer: str = "",
    **calls: Placement,
) -> Plan:
    """All calls as `default`, but for some; `__` stands for the dot."""
    chosen = {name.replace("__", "."): placement for name, placement in calls.items()}
    placements = {call.name: default for call in graph.calls} | chosen
    return Plan(CLUSTER, placements, tuple(offload.split()), tuple(offload_optimizer.split()))


DP, TP, PP = place("0-1", 2), place("0-1", 1, 2), place("0-1", 1, 1, 2)
ZERO, ONE = place("0"), place("1")
CRITICS = {"reward__inference": ONE, "critic__inference": ONE, "critic__train": ONE}
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "ppo": {"data": {"batch": 64}, "ppo": {"minibatches": 2}},
    "grpo": {"data": {"batch": 8}, "policy": {"samples": 8, "minibatches": 2}},
    "remax": {"data": {"batch": 64}, "policy": {"minibatches": 2}},
    "dpo": {"data": {"batch": 32}},
}
"""Sections of the algorithms' recipes: 64 answers a step, two optimizer steps where there may be several."""


def make_plans(algorithm: str, graph: DataflowGraph) -> Mapping[str, Plan]:
    """Make the plans that an algorithm runs under, besides the searched one."""
    common = {
        "dp": plan(graph, DP),
        "tp": plan(graph, TP),
        "pp": plan(graph, PP),
        "tp, sequence parallel": plan(graph, place("0-1", 1, 2, sequence_parallel=True)),
        "dp, recompute": plan(graph, DP).recomputing(graph),
        "dp, small micro-batches": plan(graph, place("0-1", 2, micro_batch_tokens=512)),
        "one process": plan(graph, ZERO),
        "interleave": make_plan("interleave", graph, CLUSTER, BUDGET),
        "separate": make_plan("separate", graph, CLUSTER, BUDGET),
    }
    if algorithm == "dpo":
        return common
    sampled = {
        "generate dp, train tp": plan(graph, TP, actor__generate=DP),
        "generate tp, train dp": plan(graph, DP, actor__generate=TP),
    }
    if algorithm != "ppo":
        return common | sampled
    return {
        **common,
        **sampled,
        "1 + 1": plan(graph, ZERO, **CRITICS),
        "generate dp, train 1 + 1": plan(graph, ZERO, **CRITICS, actor__generate=DP, ref__inference=DP),
        "generate dp, train pp": plan(graph, DP, actor__train=PP, critic__train=PP),
        "generate pp, train dp": plan(graph, DP, actor__generate=PP),
        "dp, frozen offloaded": plan(graph, DP, "ref reward"),
        "dp, all offloaded": plan(graph, DP, "actor critic ref reward", "actor critic"),
    }
