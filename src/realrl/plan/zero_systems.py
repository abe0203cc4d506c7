"""Plans of systems that train with ZeRO-3. Users read the docstring of each preset as its description."""

from collections.abc import Mapping
from math import gcd

from realrl.config.errors import UserError, join
from realrl.dataflow.call import Kind
from realrl.dataflow.graph import DataflowGraph
from realrl.families.shape import ModelShape
from realrl.plan.cluster import Cluster
from realrl.plan.partition import split_by_weight
from realrl.plan.placement import Mesh, Placement, Strategy, function_placement
from realrl.plan.plan import Plan

Shapes = Mapping[str, ModelShape]
"""Role -> model shape, for the roles whose shapes are known."""


def deepspeed_chat(graph: DataflowGraph, cluster: Cluster, micro_batch_tokens: int, shapes: Shapes) -> Plan:
    """Every call on all devices: training and inference under ZeRO-3, generation by the hybrid engine, with tensor
    parallelism inside a node and data parallelism over nodes.

    DeepSpeed-Chat (Yao et al. 2023, arXiv 2308.01320, section 4). On one device there is nothing to share out.
    """
    everywhere = Mesh(0, cluster.size)
    placements = {}
    for call in graph.calls:
        if call.is_function:
            placements[call.name] = function_placement(everywhere)
        elif call.kind is Kind.GENERATE:
            shape = shapes.get(call.model_role)
            placements[call.name] = _generate(everywhere, cluster, micro_batch_tokens, shape)
        else:
            placements[call.name] = _share_out(everywhere, micro_batch_tokens)
    return Plan(cluster, placements)


def openrlhf(graph: DataflowGraph, cluster: Cluster, micro_batch_tokens: int, shapes: Shapes) -> Plan:
    """Equal parts of the devices for the engines that generate and for each trained role, under ZeRO-3; frozen
    roles share the parts of trained ones, in turn from the last. Engines get the weights after each update.

    OpenRLHF (Hu et al. 2024, arXiv 2405.11143), with the parts that its performance guide advises: generation,
    actor and critic 1:1:1, the reference beside the actor, the reward model beside the critic. Engines use tensor
    parallelism inside a node. A function runs where what it reads first comes from.
    """
    generating = tuple(call for call in graph.calls if call.kind is Kind.GENERATE)
    owners = [role for role in graph.roles if graph.trained(role)]
    frozen = [role for role in graph.roles if not graph.trained(role)]
    if not owners:
        owners, frozen = frozen, []
    names = [*(["engines that generate"] if generating else []), *owners]
    if cluster.size < len(names):
        raise UserError(
            f"plan openrlhf needs at least {len(names)} devices, for {join(names)};"
            f" cluster {cluster} has {cluster.size}"
        )
    meshes = split_by_weight(cluster, [1.0] * len(names))
    engines, of_owners = meshes[0], meshes[len(names) - len(owners) :]
    of_roles = dict(zip(owners, of_owners, strict=True))
    of_roles |= {role: of_owners[-1 - i % len(owners)] for i, role in enumerate(frozen)}
    placements: dict[str, Placement] = {}
    for call in graph.order:
        if call.role is None:
            made_by = next((p for key in call.inputs if (p := graph.producer(key)) is not None), None)
            mesh = Mesh(0, cluster.size) if made_by is None else placements[made_by.name].mesh
            placements[call.name] = function_placement(mesh)
        elif call.kind is Kind.GENERATE:
            placements[call.name] = _generate(engines, cluster, micro_batch_tokens, shapes.get(call.role))
        else:
            placements[call.name] = _share_out(of_roles[call.role], micro_batch_tokens)
    kept = tuple(role for role in owners if any(call.role == role for call in generating))
    return Plan(cluster, {call.name: placements[call.name] for call in graph.calls}, keep=kept)


def _share_out(mesh: Mesh, micro_batch_tokens: int) -> Placement:
    """Data parallelism under ZeRO-3."""
    zero = 3 if mesh.size > 1 else 1
    return Placement(mesh, Strategy(dp=mesh.size, micro_batch_tokens=micro_batch_tokens, zero=zero))


def _generate(mesh: Mesh, cluster: Cluster, micro_batch_tokens: int, shape: ModelShape | None) -> Placement:
    """Tensor parallelism inside a node, as far as the model has attention heads, and data parallelism."""
    inside = gcd(*(devices for _, devices in cluster.part(mesh.first, mesh.size).runs))
    most = inside if shape is None else shape.heads
    tp = max(t for t in range(1, inside + 1) if inside % t == 0 and t <= most)
    return Placement(mesh, Strategy(dp=mesh.size // tp, tp=tp, micro_batch_tokens=micro_batch_tokens))
