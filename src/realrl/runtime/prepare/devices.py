"""Describe the devices of a recipe for the planner. Does not import torch."""

from dataclasses import replace

from realrl.config.errors import UserError
from realrl.config.values import parse_bytes
from realrl.plan.cluster import Cluster
from realrl.planner.cluster.cluster_spec import ClusterSpec, NodeGroup
from realrl.planner.cluster.devices import DEVICES, DeviceKind, find_gpu_kind
from realrl.planner.memory.call_memory import MemoryModel
from realrl.recipe.experiment import Experiment
from realrl.runtime.prepare.cluster import named_cluster
from realrl.runtime.prepare.gpu import NO_GPU, Gpu, Here
from realrl.runtime.prepare.host import count_threads, host_memory

_ANY_GPU = replace(DEVICES["h100"], name="gpu", memory_bytes=1 << 60, host_memory_bytes=1 << 60)
"""Stand-in for an unknown GPU when only memory matters. It decodes with CUDA graphs, because these take the most
memory."""


def spec_of(experiment: Experiment, cluster: Cluster, here: Here | None = None) -> ClusterSpec | None:
    """Describe the devices of a recipe; None if their kind is unknown.

    The setting `cluster` may name the kind of device. If it does not, the kind is that of `here`, the device of
    this machine, or a CPU if the recipe computes on CPUs.

    The setting `device_memory` gives the memory of each device. Without this setting, the memory is measured if
    this machine may have devices of the kind: the memory of its GPU, or the share of one process in the host
    memory. Otherwise each device has the usual memory of its kind. `with_host_memory` sets the memory of hosts.
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
    """Describe the devices of a recipe to compute memory, but not time.

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

    The check fails if the recipe sets `device=cuda` and this machine has no GPU. It also fails if `cluster` names
    CPUs but the run computes on GPUs, or the reverse, because predictions would be for other devices.
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
    """Set the threads of the built-in CPU kind to the number that each process on this machine gets."""
    plain = DEVICES["cpu"]
    threads = count_threads(spec.cluster.largest_node)
    groups = (
        replace(group, device=group.device.with_threads(threads)) if group.device == plain else group
        for group in spec.groups
    )
    return replace(spec, groups=tuple(groups))


def _cpu(experiment: Experiment, cluster: Cluster, here: Here | None) -> DeviceKind | None:
    """Describe one process of this machine as a device. Returns None unless the recipe computes on CPUs."""
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
    """Set the memory of hosts to the recipe's `host_memory`.

    Without this setting, the hosts get the memory of this machine if its GPU may be of their kind.
    """
    if experiment.host_memory is not None:
        size = parse_bytes(experiment.host_memory)
    elif isinstance(here, Gpu) and len(spec.uniform_parts) == 1 and _may_be(here, spec.groups[0].device):
        size = host_memory()
    else:
        return spec
    return replace(spec, groups=tuple(replace(group, host_memory_bytes=size) for group in spec.groups))


def with_memory(spec: ClusterSpec, size: int) -> ClusterSpec:
    """Set the bytes of memory of each device. Raises UserError if `size` is less than drivers need."""
    groups = (replace(group, device=replace(group.device, memory_bytes=size)) for group in spec.groups)
    spec = replace(spec, groups=tuple(groups))
    try:
        MemoryModel(spec)
    except UserError as error:
        raise UserError(f"device_memory: {error}") from None
    return spec
