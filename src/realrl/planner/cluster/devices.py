"""Kinds of devices: what their data sheets say."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from realrl.config.errors import UserError
from realrl.config.explain import nearest

_GIB = 1 << 30


@dataclass(frozen=True)
class DeviceKind:
    """Peak figures of a device. What of them is achieved is said in `efficiency`."""

    name: str
    memory_bytes: int
    """As the driver reports it."""
    bf16_flops: float
    """Dense matrix products in bfloat16 with float32 sums, per second."""
    fp32_flops: float
    """The same in float32, as torch computes it by default: without TF32."""
    memory_bytes_per_s: float
    """Bandwidth of its own memory."""
    link_bytes_per_s: float
    """To the other devices of its node, in each direction."""
    link_latency_s: float
    """Of one hop of a collective inside a node."""
    host_bytes_per_s: float
    """Between its memory and the host's, in each direction."""
    node_bytes_per_s: float
    """Of the network of a node that is built around such devices, in each direction, where nothing else is
    said."""
    node_latency_s: float = 10e-6
    """Of one hop of a collective between nodes."""
    kernel_s: float = 8e-6
    """What the host needs to hand the device one operation: about 5 µs inside torch and 3 µs of Python."""
    cpu: bool = False
    """Whether it is a process on a CPU, which has no driver and works in smaller chunks."""

    def flops(self, element_bytes: int) -> float:
        """Peak of matrix products with operands of this width, per second."""
        return self.bf16_flops if element_bytes == 2 else self.fp32_flops


# The latency of a hop inside a node is of the order that NCCL's own tuning model assumes for its ring protocols
# over NVLink (NCCL 2.18, src/graph/tuning.cc: 6.6 µs base for LL, 14 µs for simple, 0.6 to 1 µs per NVLink hop);
# over PCIe it is that of a copy through host memory. Networks are those of the vendors' own eight-device systems
# with the exception of the A100's, where cloud instances and clusters have 200 Gbit/s per node and up.
_NVLINK_HOP, _PCIE_HOP = 3e-6, 8e-6
_PCIE4, _PCIE5 = 32e9, 64e9

DEVICES: Mapping[str, DeviceKind] = MappingProxyType(
    {
        kind.name: kind
        for kind in (
            # NVIDIA A100 data sheet (SXM4): 312 / 19.5 TFLOP/s, 1,555 and 2,039 GB/s, NVLink 600 GB/s both ways.
            DeviceKind(
                "a100-40g", int(39.4 * _GIB), 312e12, 19.5e12, 1555e9, 300e9, _NVLINK_HOP, _PCIE4, 25e9
            ),
            DeviceKind(
                "a100-80g", int(79.2 * _GIB), 312e12, 19.5e12, 2039e9, 300e9, _NVLINK_HOP, _PCIE4, 25e9
            ),
            # The A100 with NVLink cut to 400 GB/s both ways.
            DeviceKind(
                "a800-80g", int(79.2 * _GIB), 312e12, 19.5e12, 2039e9, 200e9, _NVLINK_HOP, _PCIE4, 25e9
            ),
            # NVIDIA H100 data sheet (SXM5): 989 / 67 TFLOP/s, 3.35 TB/s, NVLink 900 GB/s; DGX: 8 x 400 Gbit/s.
            DeviceKind("h100", int(79.1 * _GIB), 989e12, 67e12, 3350e9, 450e9, _NVLINK_HOP, _PCIE5, 400e9),
            # NVIDIA H200 data sheet: as the H100, with 141 GB at 4.8 TB/s.
            DeviceKind("h200", int(139.8 * _GIB), 989e12, 67e12, 4800e9, 450e9, _NVLINK_HOP, _PCIE5, 400e9),
            # NVIDIA HGX B200 data sheet, per device: 2.25 PFLOP/s dense, 75 TFLOP/s, 8 TB/s, NVLink 1.8 TB/s.
            DeviceKind("b200", int(178.4 * _GIB), 2250e12, 75e12, 8000e9, 900e9, _NVLINK_HOP, _PCIE5, 400e9),
            # NVIDIA L40S data sheet: 362 / 91.6 TFLOP/s, 48 GB at 864 GB/s, PCIe 4 and no NVLink.
            DeviceKind("l40s", int(44.4 * _GIB), 362e12, 91.6e12, 864e9, 32e9, _PCIE_HOP, _PCIE4, 25e9),
            # NVIDIA Ada white paper: 165 / 82.6 TFLOP/s, 24 GB at 1,008 GB/s; without peer-to-peer access, so that
            # what devices exchange passes PCIe twice.
            DeviceKind(
                "rtx-4090", int(23.5 * _GIB), 165e12, 82.6e12, 1008e9, 16e9, _PCIE_HOP, _PCIE4, 1.25e9
            ),
            # One process on one core of a 2-core AMD EPYC virtual machine, torch 2.13: about 105 and 325 GFLOP/s;
            # gloo over loopback, a small all-reduce about 1 ms. A profile says it better.
            DeviceKind(
                "cpu",
                8 * _GIB,
                325e9,
                105e9,
                10e9,
                3.5e9,
                0.5e-3,
                10e9,
                1.25e9,
                1e-3,
                kernel_s=10e-6,
                cpu=True,
            ),
        )
    }
)
"""Name -> kind."""


def find_device_kind(name: str) -> DeviceKind:
    """The built-in kind of that name; UserError, naming those there are, for any other."""
    if name not in DEVICES:
        hint = nearest(name, DEVICES)
        suffix = f"; did you mean {hint}?" if hint else ""
        raise UserError(f"device {name!r} is not known; known are {', '.join(DEVICES)}{suffix}")
    return DEVICES[name]


def find_gpu_kind(name: str) -> DeviceKind | None:
    """The built-in kind of a GPU that torch names, for example `NVIDIA A100-SXM4-80GB`; None for any other.

    Cards without the links of a kind, and parts of a card, are others.
    """
    words = re.split(r"[^A-Z0-9]+", name.upper())
    if {"PCIE", "NVL", "MIG"} & set(words):
        return None
    for kind in DEVICES.values():
        parts = kind.name.upper().split("-")
        if not kind.cpu and all(any(word.startswith(part) for word in words) for part in parts):
            return kind
    return None
