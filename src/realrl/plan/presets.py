"""Published strategies as plans, by name. Users read the docstring of each preset as its description."""

from collections.abc import Callable, Iterable, Mapping
from math import gcd

from realrl.config.errors import UserError, join
from realrl.config.explain import brief, nearest
from realrl.config.paths import is_yaml
from realrl.dataflow.call import Call, Kind
from realrl.dataflow.graph import DataflowGraph
from realrl.families.shape import ModelShape
from realrl.families.sizes import count_matrix_weights
from realrl.plan.cluster import Cluster
from realrl.plan.placement import Mesh, Placement, Strategy, function_placement
from realrl.plan.plan import Plan
from realrl.plan.split_cluster import split_by_weight, split_evenly

Shapes = Mapping[str, ModelShape]
"""Role -> shape, for roles whose shapes are known."""

SEARCH = "search"
"""Name of the plan that the planner finds for the recipe."""


def symmetric(graph: DataflowGraph, cluster: Cluster, micro_batch_tokens: int, shapes: Shapes) -> Plan:
    """Every call runs on all devices, with data parallelism. This is the "flattening" of Xiao et al. (2023, arXiv
    2312.11819)."""
    everywhere = Mesh(0, cluster.size)
    placement = _data_parallel(everywhere, micro_batch_tokens)
    return Plan(cluster, {call.name: placement for call in _models(graph)} | _functions(graph, everywhere))


def disjoint(graph: DataflowGraph, cluster: Cluster, micro_batch_tokens: int, shapes: Shapes) -> Plan:
    """Each role has devices of its own, so that calls of different roles run side by side.

    This is the simplest disjoint placement. It has no separate engines for generation (see `openrlhf`). Every role
    gets the same number of devices, the largest that makes valid meshes, and uses them for data parallelism. A
    function runs where its first input is produced.
    """
    roles = graph.roles
    if cluster.size < len(roles):
        raise UserError(
            f"plan disjoint needs at least {len(roles)} devices, one for each of {', '.join(roles)}; "
            f"cluster {cluster} has {cluster.size}"
        )
    meshes = dict(zip(roles, split_evenly(cluster, len(roles)), strict=True))
    placements: dict[str, Placement] = {}
    for call in _models(graph):
        placements[call.name] = _data_parallel(meshes[call.model_role], micro_batch_tokens)
    for call in graph.functions:
        placements[call.name] = _beside_producer(graph, call, placements, cluster)
    return Plan(cluster, {call.name: placements[call.name] for call in graph.calls})


def interleave(graph: DataflowGraph, cluster: Cluster, micro_batch_tokens: int, shapes: Shapes) -> Plan:
    """Generation and training run on all devices. Inference calls that do not depend on each other get exclusive
    parts of the cluster and run side by side.

    This is the "interleaving" of Xiao et al. (2023, arXiv 2312.11819). Larger models get larger parts. If there are
    more such calls than devices, several calls share a device. Every part is used for data parallelism. Trained
    models stay on all devices. While inference needs their parameters on a part, a copy is made there. Functions
    use no device and run on all hosts.
    """
    everywhere = Mesh(0, cluster.size)
    meshes = {call.name: everywhere for call in _models(graph)}
    for calls in _independent_inference(graph):
        heaviest_first = sorted(calls, key=lambda call: -_weight(call, calls, shapes))
        weights = [_weight(call, calls, shapes) for call in heaviest_first]
        guests: dict[Mesh, list[float]] = {
            mesh: [] for mesh in split_by_weight(cluster, weights[: cluster.size])
        }
        for call, weight in zip(heaviest_first, weights, strict=True):
            mesh = min(guests, key=lambda mesh: (len(guests[mesh]), sum(guests[mesh])))
            meshes[call.name] = mesh
            guests[mesh].append(weight)
    placements = {name: _data_parallel(mesh, micro_batch_tokens) for name, mesh in meshes.items()}
    return Plan(cluster, placements | _functions(graph, everywhere))


def separate(graph: DataflowGraph, cluster: Cluster, micro_batch_tokens: int, shapes: Shapes) -> Plan:
    """Devices are split into a training side and an inference side. Generation, all inference and functions run on
    the inference side. It has shadow copies of trained models, which are refreshed once after each update.

    This is the "separation" of Xiao et al. (2023, arXiv 2312.11819). The two sides are halves of the cluster, or
    the training side is larger if the cluster has no halves. Each side is used for data parallelism.
    """
    if cluster.size < 2:
        raise UserError(f"plan separate needs at least 2 devices; cluster {cluster} has {cluster.size}")
    # The training side weighs more, so it is the side that grows if two halves do not fill the cluster.
    training, inference = split_by_weight(cluster, [2, 1])
    placements = {
        call.name: _data_parallel(training if call.kind is Kind.TRAIN else inference, micro_batch_tokens)
        for call in _models(graph)
    } | _functions(graph, inference)
    shadows = [r for r in graph.roles if len({call.kind is Kind.TRAIN for call in graph.role_calls(r)}) == 2]
    return Plan(cluster, placements, keep=tuple(shadows))


def heuristic(graph: DataflowGraph, cluster: Cluster, micro_batch_tokens: int, shapes: Shapes) -> Plan:
    """Every call runs on all devices, with tensor parallelism inside a node and pipeline parallelism between nodes:
    tp = devices per node, pp = nodes, dp = 1. Functions run on all hosts.

    This is the Megatron-style baseline of ReaL (Mei et al. 2024, arXiv 2406.14088). If nodes differ in size, tp is
    the greatest common divisor of their devices, and a node has several stages.
    """
    tp = gcd(*(devices for _, devices in cluster.runs))
    pp = cluster.size // tp
    everywhere = Mesh(0, cluster.size)
    placement = Placement(everywhere, Strategy(tp=tp, pp=pp, micro_batch_tokens=micro_batch_tokens))
    return Plan(cluster, {call.name: placement for call in _models(graph)} | _functions(graph, everywhere))


def deepspeed_chat(graph: DataflowGraph, cluster: Cluster, micro_batch_tokens: int, shapes: Shapes) -> Plan:
    """Every call runs on all devices. Training and inference use ZeRO-3. Generation uses the hybrid engine, with
    tensor parallelism inside a node and data parallelism over nodes.

    This is the strategy of DeepSpeed-Chat (Yao et al. 2023, arXiv 2308.01320, section 4). A single device has
    nothing to shard.
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
    """The generation engines and each trained role get equal parts of the devices. Training and inference use
    ZeRO-3. Frozen roles are placed on the parts of trained roles, starting with the last part. Engines get the
    weights after each update.

    This is the strategy of OpenRLHF (Hu et al. 2024, arXiv 2405.11143), with the parts that its performance guide
    recommends: generation, actor and critic 1:1:1, the reference beside the actor, the reward model beside the
    critic. Engines use tensor parallelism inside a node. A function runs on the devices of the first call that it
    reads from.
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
    for call in _models(graph):
        role = call.model_role
        if call.kind is Kind.GENERATE:
            placements[call.name] = _generate(engines, cluster, micro_batch_tokens, shapes.get(role))
        else:
            placements[call.name] = _share_out(of_roles[role], micro_batch_tokens)
    for call in graph.functions:
        placements[call.name] = _beside_producer(graph, call, placements, cluster)
    kept = tuple(role for role in owners if any(call.role == role for call in generating))
    return Plan(cluster, {call.name: placements[call.name] for call in graph.calls}, keep=kept)


PRESETS: dict[str, Callable[[DataflowGraph, Cluster, int, Shapes], Plan]] = {
    "symmetric": symmetric,
    "disjoint": disjoint,
    "interleave": interleave,
    "separate": separate,
    "heuristic": heuristic,
    "deepspeed-chat": deepspeed_chat,
    "openrlhf": openrlhf,
}
"""Name -> function of the graph, the cluster, the micro-batch tokens, and the known shapes by role."""


def make_plan(
    name_or_file: str,
    graph: DataflowGraph,
    cluster: Cluster,
    micro_batch_tokens: int,
    shapes: Shapes | None = None,
    *,
    recompute: bool = False,
) -> Plan:
    """Make the plan that a preset's name or a plan file stands for, and check it against the graph and the models.

    `recompute` decides whether training calls of a preset recompute activations; a plan file has a setting for this
    in each call. Raises UserError for an unknown name, a file for another cluster, or a plan that does not fit.
    """
    shapes = shapes or {}
    if name_or_file in PRESETS:
        plan = PRESETS[name_or_file](graph, cluster, micro_batch_tokens, shapes)
        plan = plan.recomputing(graph) if recompute else plan
    else:
        plan = load_plan(name_or_file, graph, micro_batch_tokens)
        if plan.cluster != cluster:
            raise UserError(f"plan file {name_or_file} is for cluster {plan.cluster}; this run has {cluster}")
    plan.check(graph, shapes)
    return plan


def load_plan(file: str, graph: DataflowGraph, micro_batch_tokens: int) -> Plan:
    """Load a plan file for a graph. The setting that names the file also accepts presets. Raises UserError if
    `file` does not name a YAML file."""
    if is_yaml(file):
        return Plan.load(file, graph, micro_batch_tokens)
    hint = nearest(file, (*PRESETS, SEARCH))
    suffix = f"; did you mean {hint}?" if hint else ""
    accepted = ", ".join(PRESETS)
    raise UserError(
        f"plan: {brief(file)} is neither a preset ({accepted}), {SEARCH}, nor a .yaml file{suffix}"
    )


def _models(graph: DataflowGraph) -> list[Call]:
    return [call for call in graph.calls if not call.is_function]


def _functions(graph: DataflowGraph, mesh: Mesh) -> dict[str, Placement]:
    return {call.name: function_placement(mesh) for call in graph.functions}


def _beside_producer(
    graph: DataflowGraph, call: Call, placements: Mapping[str, Placement], cluster: Cluster
) -> Placement:
    """Place a function on the mesh of the first call that it reads from; on all devices if there is none.

    `placements` has those of all models.
    """
    made_by = next((p for key in call.inputs if (p := graph.producer(key)) is not None), None)
    if made_by is None:
        return function_placement(Mesh(0, cluster.size))
    if made_by.is_function:
        return _beside_producer(graph, made_by, placements, cluster)
    return function_placement(placements[made_by.name].mesh)


def _data_parallel(mesh: Mesh, micro_batch_tokens: int) -> Placement:
    return Placement(mesh, Strategy(dp=mesh.size, micro_batch_tokens=micro_batch_tokens))


def _independent_inference(graph: DataflowGraph) -> Iterable[list[Call]]:
    """Yield groups of inference calls at the same depth of the graph, so that none waits for another."""
    depth: dict[Call, int] = {}
    for call in graph.order:
        depth[call] = 1 + max((depth[other] for other in graph.dependencies(call)), default=0)
    for level in range(1, max(depth.values()) + 1):
        found = [call for call in graph.order if depth[call] == level and call.kind is Kind.INFERENCE]
        if len(found) > 1:
            yield found


def _weight(call: Call, calls: Iterable[Call], shapes: Shapes) -> float:
    """Weigh an inference call by the number of parameters that each token is multiplied by. The weight is 1 unless
    the shapes of all `calls` are known."""
    if any(other.model_role not in shapes for other in calls):
        return 1.0
    return count_matrix_weights(shapes[call.model_role])


def _share_out(mesh: Mesh, micro_batch_tokens: int) -> Placement:
    zero = 3 if mesh.size > 1 else 1
    return Placement(mesh, Strategy(dp=mesh.size, micro_batch_tokens=micro_batch_tokens, zero=zero))


def _generate(mesh: Mesh, cluster: Cluster, micro_batch_tokens: int, shape: ModelShape | None) -> Placement:
    """Use tensor parallelism inside a node, limited by the number of attention heads, and data parallelism for the
    remaining factor."""
    inside = gcd(*(devices for _, devices in cluster.part(mesh.first, mesh.size).runs))
    most = inside if shape is None else shape.heads
    tp = max(t for t in range(1, inside + 1) if inside % t == 0 and t <= most)
    return Placement(mesh, Strategy(dp=mesh.size // tp, tp=tp, micro_batch_tokens=micro_batch_tokens))
