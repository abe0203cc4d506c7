"""From a recipe to what its plans are costed with. No torch."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from realrl.checkpoint.directory import shape_of
from realrl.config.errors import UserError
from realrl.config.paths import local_path
from realrl.config.units import parse_bytes
from realrl.dataflow.graph import DataflowGraph
from realrl.plan.cluster import Cluster
from realrl.plan.plan import Plan
from realrl.plan.presets import PRESETS, SEARCH, load_plan
from realrl.planner.cluster.devices import DEVICES, DeviceKind, kind_of_gpu
from realrl.planner.cluster.spec import ClusterSpec, NodeGroup
from realrl.planner.cost.model import CostModel
from realrl.planner.memory.model import MemoryModel
from realrl.planner.profile.profile import Profile
from realrl.planner.search.plan_search import Wanted
from realrl.planner.simulate.scenario import Scenario
from realrl.planner.space.build import Choices
from realrl.planner.workload.workload import Workload
from realrl.program.memory import Stored
from realrl.recipe.experiment import Experiment
from realrl.recipe.graphs import build_graph
from realrl.runtime.prepare.compile import Compiled, models, stored_models
from realrl.runtime.prepare.gpu import NO_GPU, Gpu, Here
from realrl.runtime.prepare.host import host_memory

_ANY_GPU = replace(DEVICES["a100-80g"], name="gpu", memory_bytes=1 << 60)
"""Stands for a GPU that is not known, where only memory counts."""


def named_cluster(text: str) -> ClusterSpec | None:
    """The devices that a recipe's `cluster` names by their kind or in a file; None where it only counts them.

    UserError where it does so wrongly.
    """
    names = ":" in text or Path(text).suffix in (".yaml", ".yml")
    return ClusterSpec.parse(text) if names else None


def written_cluster(text: str) -> Cluster | None:
    """Nodes and devices per node that a recipe's `cluster` says; None for `auto`. UserError for nonsense."""
    if text == "auto":
        return None
    named = named_cluster(text)
    return Cluster.parse(text) if named is None else named.cluster


def spec_of(experiment: Experiment, cluster: Cluster, here: Here | None = None) -> ClusterSpec | None:
    """The devices of a recipe with what is known of them.

    Their kind is what the recipe's `cluster` names; else `cpu` where it computes on CPUs; else that of `here`,
    which is what the machine computes with. None where none of them says it. Their memory is the recipe's
    `device_memory`; else, if devices here may be of the kind, that of the GPU or a process's part of the
    machine's; else that of the kind.
    """
    spec = named_cluster(experiment.cluster)
    if spec is None:
        kind = kind_of_gpu(here.name) if isinstance(here, Gpu) else _cpu(experiment, cluster, here)
        if kind is None:
            return None
        spec = _spec(cluster, kind)
    if experiment.device_memory is not None:
        return with_memory(spec, parse_bytes(experiment.device_memory))
    if here is None or len(spec.groups) > 1 or not _may_be(here, spec.groups[0].device):
        return spec
    size = here.memory_bytes if isinstance(here, Gpu) else host_memory() // cluster.devices_per_node
    return with_memory(spec, size)


def _may_be(here: Here, kind: DeviceKind) -> bool:
    """Whether it may be of a kind that a recipe names; a kind of the user's own has a name of its own."""
    if here == "cpu" or kind.cpu:
        return here == "cpu" and kind.cpu
    known = kind_of_gpu(here.name)
    return known is None or known.name == kind.name


def memory_spec(experiment: Experiment, cluster: Cluster, here: Here | None = None) -> ClusterSpec:
    """The same for questions about memory alone, for which all GPUs are alike; endless where it is not known."""
    spec = spec_of(experiment, cluster, here)
    if spec is not None:
        return spec
    if experiment.device_memory is not None:
        return with_memory(_spec(cluster, _ANY_GPU), parse_bytes(experiment.device_memory))
    size = here.memory_bytes if isinstance(here, Gpu) else _ANY_GPU.memory_bytes
    return with_memory(_spec(cluster, _ANY_GPU), size)


def check_kind(experiment: Experiment, cluster: Cluster, here: Here) -> None:
    """UserError where a recipe that is about to run wants GPUs and there are none; or names GPUs but computes on
    CPUs, or the other way round: what is predicted and calibrated would be something else."""
    if experiment.device == "cuda" and here == "cpu":
        raise UserError(NO_GPU)
    named = named_cluster(experiment.cluster)
    if named is None or {group.device.cpu for group in named.groups} == {here == "cpu"}:
        return
    kinds = " and ".join(dict.fromkeys(group.device.name for group in named.groups))
    what = "CPUs" if here == "cpu" else here.name
    raise UserError(
        f"cluster={experiment.cluster} names {kinds}, but this run computes on {what}; set cluster={cluster}"
    )


def host_is_device(experiment: Experiment, spec: ClusterSpec) -> bool:
    """Whether devices are processes that share a machine's memory, so that offloading frees nothing."""
    return experiment.device_memory is None and spec.groups[0].device.cpu


def wanted_plans(experiment: Experiment, spec: ClusterSpec, out: Path | None = None) -> Wanted:
    """What a recipe says about plans that it does not give. `out`: the plan file that is going to be written.

    UserError where it names neither a preset nor a plan file that can be read, unless that is `out`.
    """
    choices = Choices(offload=not host_is_device(experiment, spec))
    own: dict[str, Plan] = {}
    name = experiment.plan
    if name not in (*PRESETS, SEARCH) and not (
        out is not None and out == local_path(name) and not out.exists()
    ):
        own = {name: load_plan(name, experiment.micro_batch_tokens)}
    return Wanted(experiment.micro_batch_tokens, experiment.recompute, choices, own)


def search_spec(experiment: Experiment, cluster: Cluster, here: Here) -> ClusterSpec:
    """The same for a search; UserError where the kind of device is not known."""
    spec = spec_of(experiment, cluster, here)
    if spec is None:
        assert isinstance(here, Gpu), "a CPU is known"
        raise UserError(
            f"plan: search knows no device like {here.name}; write a cluster YAML file that says which kind it is"
            " `like`, and name the file in cluster"
        )
    return spec


def _cpu(experiment: Experiment, cluster: Cluster, here: Here | None) -> DeviceKind | None:
    """A process on this machine, if that is what computes."""
    if here is None and experiment.device != "cpu":
        return None
    return replace(DEVICES["cpu"], memory_bytes=max(1, host_memory() // cluster.devices_per_node))


def _spec(cluster: Cluster, kind: DeviceKind) -> ClusterSpec:
    group = NodeGroup(cluster.nodes, cluster.devices_per_node, kind, kind.node_bytes_per_s)
    return ClusterSpec(str(group), (group,))


def with_memory(spec: ClusterSpec, size: int) -> ClusterSpec:
    """The same devices with so many bytes of memory each. UserError if it is less than drivers take."""
    groups = (replace(group, device=replace(group.device, memory_bytes=size)) for group in spec.groups)
    spec = replace(spec, groups=tuple(groups))
    try:
        MemoryModel(spec)
    except UserError as error:
        raise UserError(f"device_memory: {error}") from None
    return spec


def phase_scenarios(experiment: Experiment, compiled: Compiled, spec: ClusterSpec) -> dict[str, Scenario]:
    """Training and evaluation steps by the names of `Compiled.phases`, for questions about memory.

    Roles whose sizes are not known here have no model in them.
    """
    cost, memory, found = CostModel(spec), MemoryModel(spec), {}
    for name, phase in compiled.phases.items():
        workload = Workload.of(experiment)
        if name != "train":
            # As `Evaluation` has it: with fewer records a rank could be left without any.
            dp = max(place.strategy.dp for place in phase.plan.placements.values())
            items = experiment.data.eval_batch or experiment.data.batch
            workload = replace(workload, items=max(items, 2 * dp), samples=1)
        found[name] = Scenario(phase.graph, compiled.memory.stored, spec, workload, cost, memory)
    return found


def make_scenario(
    experiment: Experiment,
    spec: ClusterSpec,
    *,
    profile: Profile | None = None,
    prompts: Sequence[int] | None = None,
    answers: Sequence[int] | None = None,
) -> Scenario:
    """The training step of a recipe on a cluster.

    `profile` counts for devices of its kind. `prompts` and `answers`: measured lengths in tokens; without them
    each sequence is as long as it may be. UserError if the size of a model cannot be found out.
    """
    graph = build_graph(experiment)
    workload = Workload.of(experiment, prompts=prompts, answers=answers)
    stored = _all_stored(experiment, graph)
    return Scenario(graph, stored, spec, workload, CostModel(spec, profile), MemoryModel(spec))


def _all_stored(experiment: Experiment, graph: DataflowGraph) -> dict[str, Stored]:
    shapes = {}
    for role, config in models(experiment).items():
        try:
            shapes[role] = shape_of(config)
        except UserError as error:
            raise UserError(
                f"models.{role}: planning needs the size of the model: {error}; or set models.{role}.path=null and"
                f" models.{role}.shape to a size, for example llama-2-7b"
            ) from None
    return stored_models(experiment, graph, shapes)
