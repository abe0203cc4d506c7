"""Describe the devices of a recipe for the planner. Does not import torch."""

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
"""Stand-in for an unknown GPU when only memory matters. Its decode steps are CUDA graphs, which is the worst
case."""


def spec_of(experiment: Experiment, cluster: Cluster, here: Here | None = None) -> ClusterSpec | None:
    """Describe the devices of a recipe; None if their kind is unknown.

    The kind of the devices comes from `cluster`, or else from `here`, the devices of this machine; it is `cpu` if
    the recipe computes on CPUs. The size of their memory comes from `device_memory`. Without this setting, it is
    measured on this machine if its devices may be of the kind: the memory of the GPU, or a process's share of the
    host memory. Otherwise the kind determines it. `with_host_memory` sets the memory of hosts.
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
    """Return whether this machine's device may be of a kind. User-defined kinds match by name."""
    if here == "cpu" or kind.cpu:
        return here == "cpu" and kind.cpu
    known = find_gpu_kind(here.name)
    return known is None or known.name == kind.name


def memory_spec(experiment: Experiment, cluster: Cluster, here: Here | None = None) -> ClusterSpec:
    """Describe the devices of a recipe for questions about memory alone.

    A GPU of unknown kind is treated like an H100. If the size of its memory is unknown, the memory is unlimited.
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
    """Check that this machine has the kind of devices that a recipe names. Raises UserError if not.

    Missing GPUs are refused. CPUs instead of GPUs, or GPUs instead of CPUs, are refused too, because prediction and
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
    """Return whether the devices are processes that share one machine's memory. Offloading then frees nothing."""
    return experiment.device_memory is None and spec.groups[0].device.cpu


def search_spec(experiment: Experiment, cluster: Cluster, here: Here) -> ClusterSpec:
    """Describe the devices of a recipe for a search. Raises UserError if their kind is unknown."""
    spec = spec_of(experiment, cluster, here)
    if spec is None:
        assert isinstance(here, Gpu), "a CPU is known"
        raise UserError(
            f"plan: search knows no device like {here.name}; write a cluster YAML file that says which kind it is"
            " `like`, and name the file in cluster"
        )
    return spec


def _with_threads(spec: ClusterSpec) -> ClusterSpec:
    """Set the number of threads of the built-in CPU kind to that of processes on this machine."""
    plain = DEVICES["cpu"]
    threads = count_threads(spec.cluster.largest_node)
    groups = (
        replace(group, device=group.device.with_threads(threads)) if group.device == plain else group
        for group in spec.groups
    )
    return replace(spec, groups=tuple(groups))


def _cpu(experiment: Experiment, cluster: Cluster, here: Here | None) -> DeviceKind | None:
    """Describe a process as a device; None unless the recipe computes on CPUs."""
    if here is None and experiment.device != "cpu":
        return None
    each = cluster.largest_node  # if nodes differ, all are treated like the slowest one
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
    """Set the memory of hosts to the recipe's value, or to this machine's if its devices may be of the kind."""
    if experiment.host_memory is not None:
        size = parse_bytes(experiment.host_memory)
    elif isinstance(here, Gpu) and len(spec.uniform_parts) == 1 and _may_be(here, spec.groups[0].device):
        size = host_memory()
    else:
        return spec
    return replace(spec, groups=tuple(replace(group, host_memory_bytes=size) for group in spec.groups))


def with_memory(spec: ClusterSpec, size: int) -> ClusterSpec:
    """Set the memory of devices. Raises UserError if this is less than drivers need."""
    groups = (replace(group, device=replace(group.device, memory_bytes=size)) for group in spec.groups)
    spec = replace(spec, groups=tuple(groups))
    try:
        MemoryModel(spec)
    except UserError as error:
        raise UserError(f"device_memory: {error}") from None
    return spec
