"""Nodes and devices that a plan may use, and the speed of their links."""

import re
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache

from realrl.config.errors import UserError
from realrl.config.values import not_devices


@dataclass(frozen=True, init=False)
class Cluster:
    """Nodes and the number of devices in each; ranks are numbered node by node."""

    runs: tuple[tuple[int, int], ...]
    """(number of nodes, devices in each node) for each run of equal nodes; neighbouring runs differ in devices per
    node."""

    def __init__(self, nodes: int, devices_per_node: int, *further: tuple[int, int]) -> None:
        """Make `nodes` nodes of `devices_per_node` devices, followed by more runs. Raises UserError for numbers
        below 1."""
        runs: list[tuple[int, int]] = []
        for count, devices in ((nodes, devices_per_node), *further):
            if count < 1 or devices < 1:
                raise UserError(f"cluster {count}x{devices}: both numbers must be at least 1")
            before = runs.pop()[0] if runs and runs[-1][1] == devices else 0
            runs.append((before + count, devices))
        object.__setattr__(self, "runs", tuple(runs))

    @classmethod
    def of_nodes(cls, devices: Iterable[int]) -> "Cluster":
        """Make a cluster of nodes with these numbers of devices; at least one node."""
        first, *further = ((1, number) for number in devices)
        return cls(*first, *further)

    @property
    def even(self) -> bool:
        """Whether all nodes have the same number of devices."""
        return len(self.runs) == 1

    @cached_property
    def nodes(self) -> int:
        return sum(count for count, _ in self.runs)

    @cached_property
    def size(self) -> int:
        """Number of devices, and so of ranks."""
        return sum(count * devices for count, devices in self.runs)

    @property
    def largest_node(self) -> int:
        """Number of devices in the largest node."""
        return max(devices for _, devices in self.runs)

    @cached_property
    def bounds(self) -> tuple[int, ...]:
        """First rank of each node, and at the end the number of ranks."""
        bounds = [0]
        for count, devices in self.runs:
            bounds += range(bounds[-1] + devices, bounds[-1] + count * devices + 1, devices)
        return tuple(bounds)

    def node(self, rank: int) -> int:
        return rank // self.runs[0][1] if self.even else bisect_right(self.bounds, rank) - 1

    def ranks(self, node: int) -> range:
        return range(self.bounds[node], self.bounds[node + 1])

    def part(self, first: int, size: int) -> "Cluster":
        """Find the nodes of `size` ranks from `first` on, each with only the devices of these ranks."""
        return _part(self, first, size)

    @classmethod
    def parse(cls, text: str) -> "Cluster":
        """Read `NODESxDEVICES`, or several joined by `+`, such as `2x8` or `2x8+1x4`. Raises UserError for other
        texts."""
        matches = [re.fullmatch(r"(\d{1,9})x(\d{1,9})", part.strip()) for part in text.split("+")]
        runs = [(int(match[1]), int(match[2])) for match in matches if match is not None]
        if len(runs) < len(matches):
            raise UserError(f"cluster={not_devices(text)}")
        return cls(*runs[0], *runs[1:])

    def __str__(self) -> str:
        return "+".join(f"{count}x{devices}" for count, devices in self.runs)


@lru_cache(maxsize=1 << 14)
def _part(cluster: Cluster, first: int, size: int) -> Cluster:
    end = first + size
    nodes = range(cluster.node(first), cluster.node(end - 1) + 1)
    bounds = cluster.bounds
    return Cluster.of_nodes(min(end, bounds[n + 1]) - max(first, bounds[n]) for n in nodes)


@dataclass(frozen=True)
class Links:
    """Bandwidths of the ports of devices and nodes, and the latency of a message.

    Each device has an in-port and an out-port inside its node. Each node has an in-port and an out-port to other
    nodes. Bytes between nodes pass four ports: the sender's device and node, then the receiver's node and device.
    The default bandwidths come from ReaL (arXiv 2406.14088). The default latency is typical of a message between
    GPUs of two nodes.
    """

    device_bytes_per_s: float = 170e9
    node_bytes_per_s: float = 20e9
    latency_s: float = 30e-6

    def __post_init__(self) -> None:
        if self.device_bytes_per_s <= 0 or self.node_bytes_per_s <= 0 or self.latency_s < 0:
            raise ValueError(f"{self}: bandwidths must be above 0 and the latency at least 0")
