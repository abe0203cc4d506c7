"""Cluster description: groups of homogeneous nodes, their devices, links and prices."""

import re
from bisect import bisect_right
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, NonNegativeFloat, PositiveFloat, PositiveInt

from realrl.config.base import Settings
from realrl.config.errors import UserError
from realrl.config.explain import brief, mistakes_in
from realrl.config.paths import is_yaml
from realrl.config.values import check_size, parse_bytes
from realrl.config.yaml_file import read_yaml
from realrl.plan.cluster import Cluster
from realrl.plan.placement import Mesh
from realrl.planner.cluster.devices import DeviceKind, find_device_kind

MOST_DEVICES = 1 << 14
"""Number of devices of the largest cluster that can be planned. A plan for 10,000 devices takes one core more than
three minutes."""

STORAGE = 1e9
"""Default bandwidth between a node and the storage while all nodes use it, in bytes per second.

Llama 3's file system sustains 2 TB/s for 2,048 nodes (arXiv 2407.21783, section 3.3.1)."""


@dataclass(frozen=True, kw_only=True)
class NodeGroup:
    """Homogeneous nodes of a cluster."""

    nodes: int
    devices_per_node: int
    device: DeviceKind
    node_bytes_per_s: float
    """Bandwidth between one node and the others, per direction, in bytes per second."""
    price_per_device_hour: float | None = None
    host_memory_bytes: int | None = None
    """Bytes of memory of each node's host. None means the default of the device kind."""
    storage_bytes_per_s: float = STORAGE
    """Bandwidth between each node and the storage of checkpoints and weights, per direction, while all nodes use
    it, in bytes per second."""

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.devices_per_node < 1:
            raise UserError(f"cluster {self.nodes}x{self.devices_per_node}: both numbers must be at least 1")

    @property
    def size(self) -> int:
        return self.nodes * self.devices_per_node

    @property
    def host_memory(self) -> int:
        """Bytes of memory of each node's host."""
        if self.host_memory_bytes is not None:
            return self.host_memory_bytes
        return self.devices_per_node * self.device.host_memory_bytes

    def __str__(self) -> str:
        return f"{self.device.name}:{self.nodes}x{self.devices_per_node}"


@dataclass(frozen=True)
class Site:
    """Devices and network under a mesh. A call takes the same time on meshes with equal sites."""

    device: DeviceKind
    nodes: Cluster
    """Nodes under the mesh, each with the number of its devices that belong to the mesh."""
    node_bytes_per_s: float
    """Network bandwidth of the slowest of these nodes, per direction, in bytes per second."""


@dataclass(frozen=True)
class ClusterSpec:
    """Cluster as groups of homogeneous nodes.

    Ranks are numbered group by group and, inside a group, node by node. A mesh has devices of one kind. It may span
    neighbouring groups of this kind, even if their nodes differ in size.
    """

    name: str
    groups: tuple[NodeGroup, ...]

    def __post_init__(self) -> None:
        if not self.groups:
            raise UserError(f"cluster {self.name} has no groups of nodes")
        if self.size > MOST_DEVICES:
            raise UserError(f"cluster {self.name} has {self.size:,} devices; {MOST_DEVICES:,} can be planned")

    @property
    def size(self) -> int:
        return sum(group.size for group in self.groups)

    @property
    def nodes(self) -> int:
        return sum(group.nodes for group in self.groups)

    @cached_property
    def cluster(self) -> Cluster:
        """Nodes of the cluster, each with its number of devices."""
        first, *further = ((group.nodes, group.devices_per_node) for group in self.groups)
        return Cluster(*first, *further)

    @cached_property
    def ends(self) -> list[int]:
        """First rank after each group."""
        return list(accumulate(group.size for group in self.groups))

    def group_index(self, rank: int) -> int:
        """Return the index of the group that a rank belongs to."""
        return bisect_right(self.ends, rank)

    def site(self, mesh: Mesh) -> Site:
        """Return the devices and network under a mesh. Raises UserError if its devices are of several kinds."""
        if mesh not in self._sites:
            mesh.check(self.cluster)
            last = self.group_index(mesh.first + mesh.size - 1)
            groups = self.groups[self.group_index(mesh.first) : last + 1]
            kinds = dict.fromkeys(group.device for group in groups)
            if len(kinds) > 1:
                names = " and ".join(dict.fromkeys(kind.name for kind in kinds))
                raise UserError(
                    f"mesh {mesh} of cluster {self.name} has devices of several kinds ({names}); a call runs on one"
                )
            network = min(group.node_bytes_per_s for group in groups)
            self._sites[mesh] = Site(groups[0].device, mesh.nodes(self.cluster), network)
        return self._sites[mesh]

    @cached_property
    def _sites(self) -> dict[Mesh, Site]:
        return {}

    def device(self, rank: int) -> DeviceKind:
        return self.groups[self.group_index(rank)].device

    @cached_property
    def uniform_parts(self) -> list[range]:
        """Node indices of each part of the cluster: neighbouring groups with one kind of device. No mesh spans two
        parts."""
        parts: list[range] = []
        first = 0
        for group, before in zip(self.groups, (None, *self.groups), strict=False):
            end = first + group.nodes
            if before is not None and before.device == group.device:
                parts[-1] = range(parts[-1].start, end)
            else:
                parts.append(range(first, end))
            first = end
        return parts

    @property
    def price_per_hour(self) -> float | None:
        """Price of all devices per hour. None unless every group has a price."""
        total = 0.0
        for group in self.groups:
            if group.price_per_device_hour is None:
                return None
            total += group.price_per_device_hour * group.size
        return total

    def with_nodes(self, nodes: int) -> "ClusterSpec":
        """Return the cluster of the first `nodes` nodes.

        A homogeneous cluster can also grow. Raises UserError if `nodes` is less than 1, or more than a
        heterogeneous cluster has.
        """
        if len(self.groups) > 1 and nodes > self.nodes:
            raise UserError(
                f"cluster {self.name} has {self.nodes} nodes that differ, so {nodes} of them cannot be planned"
            )
        if len(self.groups) == 1:
            group = replace(self.groups[0], nodes=nodes)
            return ClusterSpec(str(group), (group,))
        groups: list[NodeGroup] = []
        for group in self.groups:
            left = nodes - sum(g.nodes for g in groups)
            if left > 0 or not groups:
                groups.append(replace(group, nodes=min(left, group.nodes)))
        return ClusterSpec("+".join(map(str, groups)), tuple(groups))

    @classmethod
    def parse(cls, text: str) -> "ClusterSpec":
        """Parse a cluster such as `a100-80g:16x8` (`KIND:NODESxDEVICES`), or read a YAML file.

        A `+` joins several groups of nodes. A group without a kind has the kind of the group before it:
        `h100:2x8+1x4`. Raises UserError for any other text.
        """
        if is_yaml(text):
            return load_cluster(text)
        groups: list[NodeGroup] = []
        for part in text.split("+"):
            match = re.fullmatch(r"\s*(?:([\w.-]+):)?(\d{1,9})x(\d{1,9})\s*", part)
            if match is None or (match[1] is None and not groups):
                raise UserError(
                    f"cluster {brief(text)} is not understood; write kind:nodes x devices per node, for example"
                    " a100-80g:2x8, or cpu:1x2 for processes on CPUs, or name a .yaml file"
                )
            kind = groups[-1].device if match[1] is None else find_device_kind(match[1].lower())
            groups.append(
                NodeGroup(
                    nodes=int(match[2]),
                    devices_per_node=int(match[3]),
                    device=kind,
                    node_bytes_per_s=kind.node_bytes_per_s,
                )
            )
        return cls(text.replace(" ", ""), tuple(groups))


Size = Annotated[str, BeforeValidator(check_size)]
"""Bytes as text, for example `80GiB`."""


class _Device(Settings):
    """Device kind in a cluster file. Missing fields come from the built-in kind `like`."""

    like: str
    """Name of the built-in kind that supplies defaults."""
    name: str | None = None
    """Name of a new device kind. Profiles are measured and looked up under this name. The operator tables of the
    built-in kind do not apply to it."""
    memory: Size | None = None
    """Device memory, for example `80GiB`."""
    bf16_tflops: PositiveFloat | None = None
    """Dense peak in bfloat16, in 10^12 operations per second."""
    fp32_tflops: PositiveFloat | None = None
    """Dense peak in float32, in 10^12 operations per second."""
    memory_gb_per_s: PositiveFloat | None = None
    """Bandwidth of device memory, in 10^9 bytes per second."""
    link_gb_per_s: PositiveFloat | None = None
    """Bandwidth to the other devices of the node, each direction, in 10^9 bytes per second."""
    host_gb_per_s: PositiveFloat | None = None
    """Bandwidth to host memory, each direction, in 10^9 bytes per second."""
    threads: PositiveInt | None = None
    """Threads of a process on a CPU. The other fields count all threads together. If FLOP/s and memory bandwidth
    are missing, they grow with the number of threads."""

    def kind(self) -> DeviceKind:
        given: dict[str, Any] = {
            "name": self.name,
            "memory_bytes": None if self.memory is None else parse_bytes(self.memory),
            "bf16_flops": _times(self.bf16_tflops, 1e12),
            "fp32_flops": _times(self.fp32_tflops, 1e12),
            "memory_bytes_per_s": _times(self.memory_gb_per_s, 1e9),
            "link_bytes_per_s": _times(self.link_gb_per_s, 1e9),
            "host_bytes_per_s": _times(self.host_gb_per_s, 1e9),
        }
        changes = {name: value for name, value in given.items() if value is not None}
        kind = find_device_kind(self.like)
        if self.threads is not None:
            if not kind.cpu:
                raise UserError(f"threads: {self.like} is a GPU; only processes on a CPU have threads")
            kind = kind.with_threads(self.threads)
        if self.name is not None:
            changes["measured"] = None
        return replace(kind, **changes, guessed=kind.guessed.difference(changes))


class _Group(Settings):
    """Homogeneous nodes in a cluster file."""

    device: Any
    """Name of a built-in kind, or `{like: KIND, ...}` with the fields that differ."""
    nodes: PositiveInt
    """Number of nodes."""
    devices_per_node: PositiveInt
    """Devices of each node."""
    node_gbit_per_s: PositiveFloat | None = None
    """Bandwidth between a node and the others, each direction, in 10^9 bits per second."""
    price_per_device_hour: NonNegativeFloat | None = None
    """Price of one device for an hour, in any currency."""
    host_memory: Size | None = None
    """Memory of a node's host, for example `2TB`. The default depends on the device kind."""
    storage_gb_per_s: PositiveFloat | None = None
    """Bandwidth between each node and the storage of checkpoints and weights while all nodes use it, in 10^9 bytes
    per second. The default is 1."""

    def group(self) -> NodeGroup:
        """Build the node group. Raises UserError if `device` is neither a name nor a section."""
        given = self.device
        if not isinstance(given, str | dict):
            raise UserError(
                f"{brief(given)} is neither the name of a kind, for example h100, nor a section of keys"
            )
        kind = find_device_kind(given) if isinstance(given, str) else _Device.model_validate(given).kind()
        network = _times(self.node_gbit_per_s, 1e9 / 8) or kind.node_bytes_per_s
        return NodeGroup(
            nodes=self.nodes,
            devices_per_node=self.devices_per_node,
            device=kind,
            node_bytes_per_s=network,
            price_per_device_hour=self.price_per_device_hour,
            host_memory_bytes=None if self.host_memory is None else parse_bytes(self.host_memory),
            storage_bytes_per_s=_times(self.storage_gb_per_s, 1e9) or STORAGE,
        )


class _File(Settings):
    """A cluster file."""

    name: str | None = None
    """Name of the cluster. The default is the file name without its suffix."""
    groups: tuple[Any, ...] = Field(min_length=1, strict=False)
    """Groups of homogeneous nodes. They are validated one by one, so that an error names its group."""


def load_cluster(path: str) -> ClusterSpec:
    """Read a cluster file. Raises a UserError that names the file and the wrong field."""
    content = read_yaml(path)
    with mistakes_in(f"cluster file {path}", _File):
        file = _File.model_validate(content)
    groups = []
    for number, entry in enumerate(file.groups, 1):
        where = f"cluster file {path}: group {number}"
        with mistakes_in(where, _Group):
            group = _Group.model_validate(entry)
        with mistakes_in(f"{where}: device", _Device):
            groups.append(group.group())
    priced = [group.price_per_device_hour is not None for group in groups]
    if any(priced) and not all(priced):
        number = priced.index(False) + 1
        raise UserError(
            f"cluster file {path}: group {number}: price_per_device_hour is missing; give it for all groups, or for"
            " none"
        )
    return ClusterSpec(file.name or Path(path).stem, tuple(groups))


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor
