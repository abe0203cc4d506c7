"""Bandwidths of a cluster's links."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Links:
    """Bandwidths of the ports of devices and nodes, and the latency of a message.

    Each device has an in-port and an out-port inside its node, each node one of each to the other nodes. Bytes
    that go from node to node pass four ports: the sender's device and node, the receiver's node and device. The
    defaults of the bandwidths are those of ReaL (arXiv 2406.14088); the latency is the order of
    magnitude of one point-to-point message between GPUs of different nodes.
    """

    device_bytes_per_s: float = 170e9
    node_bytes_per_s: float = 20e9
    latency_s: float = 30e-6

    def __post_init__(self) -> None:
        if self.device_bytes_per_s <= 0 or self.node_bytes_per_s <= 0 or self.latency_s < 0:
            raise ValueError(f"{self}: bandwidths must be above 0 and the latency at least 0")
