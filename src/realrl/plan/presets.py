"""Published strategies as plans, by name."""

from collections.abc import Callable, Iterator
from pathlib import Path

from realrl.config.errors import UserError
from realrl.config.explain import nearest
from realrl.dataflow.graph import DataflowGraph
from realrl.plan.cluster import Cluster
from realrl.plan.placement import Mesh, Placement, Strategy
from realrl.plan.plan import Plan


def symmetric(graph: DataflowGraph, cluster: Cluster, micro_batch_tokens: int) -> Plan:
    """Every call on all devices under one and the same strategy.

    The strategy of DeepSpeed-Chat (Yao et al. 2023) and of APP's "flattening" (Xiao et al. 2023).
    """
    placement = _data_parallel(Mesh(0, cluster.size), micro_batch_tokens)
    return Plan(cluster, {call.name: placement for call in graph.calls})


def disjoint(graph: DataflowGraph, cluster: Cluster, micro_batch_tokens: int) -> Plan:
    """Each role owns devices of its own, so that calls of different roles can run side by side.

    The strategy of OpenRLHF (Hu et al. 2024). Every role gets the same number of devices, the largest that
    makes valid meshes; UserError if there are fewer devices than roles.
    """
    roles = graph.roles
    if cluster.size < len(roles):
        raise UserError(
            f"plan disjoint needs at least {len(roles)} devices, one for each of {', '.join(roles)}; "
            f"cluster {cluster} has {cluster.size}"
        )
    size = max(size for size in _mesh_sizes(cluster) if size * len(roles) <= cluster.size)
    meshes = {role: Mesh(i * size, size) for i, role in enumerate(roles)}
    return Plan(cluster, {c.name: _data_parallel(meshes[c.role], micro_batch_tokens) for c in graph.calls})


PRESETS: dict[str, Callable[[DataflowGraph, Cluster, int], Plan]] = {
    "symmetric": symmetric,
    "disjoint": disjoint,
}
"""Name -> function of the graph, the cluster and the micro-batch tokens."""


def make_plan(name_or_file: str, graph: DataflowGraph, cluster: Cluster, micro_batch_tokens: int) -> Plan:
    """The plan that a preset's name or a plan file stands for, checked against the graph.

    Raises UserError if it is neither, if the file is for another cluster, or if the plan does not fit.
    """
    if name_or_file in PRESETS:
        plan = PRESETS[name_or_file](graph, cluster, micro_batch_tokens)
    elif Path(name_or_file).suffix in (".yaml", ".yml"):
        plan = Plan.load(name_or_file, micro_batch_tokens)
        if plan.cluster != cluster:
            raise UserError(f"plan file {name_or_file} is for cluster {plan.cluster}; this run has {cluster}")
    else:
        hint = nearest(name_or_file, PRESETS)
        suffix = f"; did you mean {hint}?" if hint else ""
        accepted = ", ".join(PRESETS)
        raise UserError(f"plan: {name_or_file!r} is neither a preset ({accepted}) nor a .yaml file{suffix}")
    plan.check(graph)
    return plan


def _data_parallel(mesh: Mesh, micro_batch_tokens: int) -> Placement:
    return Placement(mesh, Strategy(mesh.size, micro_batch_tokens=micro_batch_tokens))


def _mesh_sizes(cluster: Cluster) -> Iterator[int]:
    """Sizes of the meshes a cluster can be tiled with: divisors of a node, and whole nodes."""
    per_node = cluster.devices_per_node
    yield from (size for size in range(1, per_node) if per_node % size == 0)
    yield from (per_node * nodes for nodes in range(1, cluster.nodes + 1))
