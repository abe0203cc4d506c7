"""Devices that a plan may use."""

import re
from dataclasses import dataclass

from realrl.config.devices import not_devices
from realrl.config.errors import UserError


@dataclass(frozen=True)
class Cluster:
    """`nodes` machines of `devices_per_node` devices; ranks are numbered node by node."""

    nodes: int
    devices_per_node: int

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.devices_per_node < 1:
            raise UserError(f"cluster {self}: both numbers must be at least 1")

    @property
    def size(self) -> int:
        """Number of devices, which is the number of ranks."""
        return self.nodes * self.devices_per_node

    def node(self, rank: int) -> int:
        """Find the node of a rank."""
        return rank // self.devices_per_node

    @classmethod
    def parse(cls, text: str) -> "Cluster":
        """Read `NODESxDEVICES`, for example `2x8`; UserError for anything else."""
        match = re.fullmatch(r"(\d{1,9})x(\d{1,9})", text.strip())
        if match is None:
            raise UserError(f"cluster={not_devices(text)}")
        return cls(int(match[1]), int(match[2]))

    def __str__(self) -> str:
        return f"{self.nodes}x{self.devices_per_node}"
