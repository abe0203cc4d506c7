"""Devices that a recipe is for, and their specs. No torch."""

from dataclasses import replace

from realrl.config.errors import UserError
from realrl.config.values import parse_bytes
from realrl.plan.cluster import Cluster
from realrl.planner.cluster.cluster_spec import ClusterSpec, NodeGroup
from realrl.planner.cluster.devices import DEVICES, DeviceKind, find_gpu_kind
from realrl.planner.memory.memory_model import MemoryModel
from realrl.recipe.experiment import Experiment
from realrl.runtime.prepare.cluster import named_cluster
from realrl.runtime.prepare.gpu import NO_GPU, Gpu, Here
from realrl.runtime.prepare.host import count_threads, host_memory

_ANY_GPU = replace(DEVICES["h100"], name="gpu", memory_bytes=1 << 60, host_memory_bytes=1 << 60)
"""Stand-in for an unknown GPU, where only memory counts: one whose decode steps are graphs, which take most."""


def spec_of(experiment: Experiment, cluster: Cluster, here: Here | None = None) -> ClusterSpec | None:
    """Describe the devices of a recipe as far as they are known.

    Their kind is what the recipe's `cluster` names; else `cpu` where it computes on CPUs; else that of `here`,
    which is what the machine computes with. None where none of them says it. Their memory is the recipe's
    `device_memory`; else, if devices here may be of the kind, that of the GPU or a process's part of the
    machine's; else that of the kind. Memory of hosts: `with_host_memory`.
    """
    spec = named_cluster(experiment.cluster)
    if spec is None:
        kind = find_gpu_kind(here.name) if isinstance(here, Gpu) else _cpu(experiment, cluster, here)
        if kind is None:
            return None
        spec = _spec(cluster, kind)
    elif here == "cpu":
        spec = _with_threads(spec)
    spec = with_host_memory(spec, experiment, here)
    if experiment.device_memory is not None:
        return with_memory(spec, parse_bytes(experiment.device_memory))
    if here is None or len(spec.uniform_parts) > 1 or not _may_be(here, spec.groups[0].device):
        return spec
    size = here.memory_bytes if isinstance(here, Gpu) else host_memory() // cluster.largest_node
    return with_memory(spec, size)


def _may_be(here: Here, kind: DeviceKind) -> bool:
    """Check whether a device may be of the kind that a recipe names; user-defined kinds match by their own name."""
    if here == "cpu" or kind.cpu:
        return here == "cpu" and kind.cpu
    known = find_gpu_kind(here.name)
    return known is None or known.name == kind.name


def memory_spec(experiment: Experiment, cluster: Cluster, here: Here | None = None) -> ClusterSpec:
    """Describe the devices of a recipe for questions about memory alone.

    A GPU of unknown kind is like any other, and without limit where its memory is not known.
    """
    spec = spec_of(experiment, cluster, here)
    if spec is not None:
        return spec
    if experiment.device_memory is not None:
        spec = with_host_memory(_spec(cluster, _ANY_GPU), experiment, here)
        return with_memory(spec, parse_bytes(experiment.device_memory))
    size = here.memory_bytes if isinstance(here, Gpu) else _ANY_GPU.memory_bytes
    return with_memory(with_host_memory(_spec(cluster, _ANY_GPU), experiment, here), size)


def check_kind(experiment: Experiment, cluster: Cluster, here: Here) -> None:
    """Check that the kind of devices that a recipe names is the one that computes; else UserError.

    GPUs that are not there are refused, and so are CPUs in place of GPUs and the reverse, since prediction and
    calibration would be for other devices.
    """
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
    """Check whether devices are processes that share a machine's memory, so that offloading frees nothing."""
    return experiment.device_memory is None and spec.groups[0].device.cpu


def search_spec(experiment: Experiment, cluster: Cluster, here: Here) -> ClusterSpec:
    """Describe the devices of a recipe for a search; UserError where their kind is not known."""
    spec = spec_of(experiment, cluster, here)
    if spec is None:
        assert isinstance(here, Gpu), "a CPU is known"
        raise UserError(
            f"plan: search knows no device like {here.name}; write a cluster YAML file that says which kind it is"
            " `like`, and name the file in cluster"
        )
    return spec


def _with_threads(spec: ClusterSpec) -> ClusterSpec:
    """Give processes of the built-in kind of CPU the threads that they have on this machine."""
    plain = DEVICES["cpu"]
    threads = count_threads(spec.cluster.largest_node)
    groups = (
        replace(group, device=group.device.with_threads(threads)) if group.device == plain else group
        for group in spec.groups
    )
    return replace(spec, groups=tuple(groups))


def _cpu(experiment: Experiment, cluster: Cluster, here: Here | None) -> DeviceKind | None:
    """Find the CPU process as a device, if CPUs compute."""
    if here is None and experiment.device != "cpu":
        return None
    each = cluster.largest_node  # where nodes differ, all are taken for the slowest
    kind = DEVICES["cpu"].with_threads(count_threads(each))
    return replace(kind, memory_bytes=max(1, host_memory() // each))


def _spec(cluster: Cluster, kind: DeviceKind) -> ClusterSpec:
    groups = tuple(
        NodeGroup(
            nodes=nodes,
            devices_per_node=devices,
            device=kind,
            node_bytes_per_s=kind.node_bytes_per_s,
        )
        for nodes, devices in cluster.runs
    )
    return ClusterSpec("+".join(map(str, groups)), groups)


def with_host_memory(spec: ClusterSpec, experiment: Experiment, here: Here | None = None) -> ClusterSpec:
    """Copy devices with the memory of hosts that the recipe names; else that of this machine, if its devices are of
    the kind; else what there is."""
    if experiment.host_memory is not None:
        size = parse_bytes(experiment.host_memory)
    elif isinstance(here, Gpu) and len(spec.uniform_parts) == 1 and _may_be(here, spec.groups[0].device):
        size = host_memory()
    else:
        return spec
    return replace(spec, groups=tuple(replace(group, host_memory_bytes=size) for group in spec.groups))


def with_memory(spec: ClusterSpec, size: int) -> ClusterSpec:
    """Copy devices with another amount of memory each; UserError if it is less than drivers take."""
    groups = (replace(group, device=replace(group.device, memory_bytes=size)) for group in spec.groups)
    spec = replace(spec, groups=tuple(groups))
    try:
        MemoryModel(spec)
    except UserError as error:
        raise UserError(f"device_memory: {error}") from None
    return spec
