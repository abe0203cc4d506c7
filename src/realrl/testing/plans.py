"""Plans that an algorithm is checked under."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from realrl.dataflow.call import Kind
from realrl.dataflow.graph import DataflowGraph
from realrl.plan.cluster import Cluster
from realrl.plan.placement import Mesh, Placement, Strategy, function_placement
from realrl.plan.plan import Plan
from realrl.plan.presets import PRESETS

CLUSTERS = (Cluster(1, 1), Cluster(1, 2), Cluster(1, 4), Cluster(2, 2), Cluster(2, 4))
"""Clusters that programs are made for."""


@dataclass(frozen=True)
class Case:
    """A plan, by the name that failures have."""

    name: str
    plan: Plan


def make_uniform_plan(
    graph: DataflowGraph,
    cluster: Cluster,
    *,
    tp: int = 1,
    pp: int = 1,
    zero: int = 1,
    micro_batch_tokens: int,
) -> Plan:
    """Make the plan in which all calls run on all devices under one strategy; functions run on all hosts.

    Calls that cannot have the stage of ZeRO, such as those that generate, have the first one.
    """
    everywhere = Mesh(0, cluster.size)
    plain = Strategy(dp=cluster.size // (tp * pp), tp=tp, pp=pp, micro_batch_tokens=micro_batch_tokens)
    stages = {Kind.TRAIN: zero, Kind.INFERENCE: 1 if zero == 2 else zero}
    placements = {
        call.name: function_placement(everywhere)
        if call.is_function
        else Placement(everywhere, replace(plain, zero=stages.get(call.kind, 1)))
        for call in graph.calls
    }
    return Plan(cluster, placements)


def list_run_cases(graph: DataflowGraph, micro_batch_tokens: int, most: int) -> Iterator[Case]:
    """List the plans to train under: symmetric, two TP ranks, two pipeline stages, and roles apart.

    Roles are on devices of their own, or on two sides of the cluster where that needs more than `most` devices.
    """
    two = Cluster(1, 2)
    yield Case("symmetric", PRESETS["symmetric"](graph, two, micro_batch_tokens, {}))
    for name in ("tp", "pp"):
        plan = make_uniform_plan(graph, two, **{name: 2}, micro_batch_tokens=micro_batch_tokens)
        yield Case(f"{name}=2", plan)
    apart, cluster = "disjoint", Cluster(1, max(2, len(graph.roles)))
    if cluster.size > most:
        apart, cluster = "separate", two
    yield Case(apart, PRESETS[apart](graph, cluster, micro_batch_tokens, {}))


def list_compiled_cases(graph: DataflowGraph, micro_batch_tokens: int) -> Iterator[Case]:
    """List the plans to make programs for: every preset on clusters of 1 to 8 devices, and everything offloaded."""
    parts = {call.role for call in graph.calls if call.kind is Kind.TRAIN}
    engines = any(call.kind is Kind.GENERATE for call in graph.calls)
    least = {"disjoint": len(graph.roles), "separate": 2, "openrlhf": len(parts) + engines}
    for cluster in CLUSTERS:
        for name, preset in PRESETS.items():
            if cluster.size >= least.get(name, 1):
                yield Case(name, preset(graph, cluster, micro_batch_tokens, {}))
    plan = make_uniform_plan(graph, Cluster(2, 2), tp=2, micro_batch_tokens=micro_batch_tokens)
    trained = tuple(role for role in graph.roles if graph.trained(role))
    yield Case("tp=2, all offloaded", replace(plan, offload=graph.roles, offload_optimizer=trained))
