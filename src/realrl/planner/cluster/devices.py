"""Data-sheet figures of device kinds."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from realrl.config.errors import UserError
from realrl.config.explain import nearest
from realrl.plan.placement import Dtype

_GIB, _GB = 1 << 30, 10**9


@dataclass(frozen=True, kw_only=True)
class DeviceKind:
    """Peak performance of a device from its data sheet. `Efficiency` holds the fractions achieved in practice."""

    name: str
    memory_bytes: int
    """Device memory as the driver reports it, in bytes."""
    bf16_flops: float
    """Peak FLOP/s of dense matmuls in bfloat16 with float32 accumulation."""
    fp32_flops: float
    """Peak FLOP/s of dense matmuls in float32 as torch computes them by default, without TF32."""
    memory_bytes_per_s: float
    """Bandwidth of device memory, in bytes per second."""
    link_bytes_per_s: float
    """Bandwidth to the other devices of the node, per direction, in bytes per second."""
    link_latency_s: float
    """Latency of one hop of a collective inside a node, in seconds."""
    host_bytes_per_s: float
    """Bandwidth between device and host memory, per direction, in bytes per second."""
    host_memory_bytes: int
    """Default memory of a node's host for each such device, in bytes."""
    node_bytes_per_s: float
    """Default network bandwidth of a node of such devices, per direction, in bytes per second."""
    node_latency_s: float = 10e-6
    """Latency of one hop of a collective between nodes, in seconds."""
    kernel_s: float = 12e-6
    """Host time to launch one kernel, in seconds. Python and torch take about 10 µs (docs/notes/constants.md), and
    the driver takes 2 to 3 µs."""
    cpu: bool = False
    """Whether the device is a process on a CPU, which has no driver and computes logits in smaller chunks."""

    groups_products: bool = False
    """Whether torch has a grouped matmul kernel for the device, as for compute capabilities 9.x and 10.x."""

    threads: int = 1
    """Threads of a process on a CPU. The other fields count all threads together."""
    guessed: frozenset[str] = frozenset()
    """Names of fields that are rough guesses. Reports give no utilisation relative to these fields."""
    measured: str | None = None
    """Name of the device's file of operator tables in `operators/measured`, or None if there is none."""

    def flops(self, dtype: Dtype) -> float:
        """Peak FLOP/s of matmuls in a data type. In `mixed`, operands are bfloat16."""
        return self.fp32_flops if dtype == "float32" else self.bf16_flops

    def with_threads(self, threads: int) -> "DeviceKind":
        """Return the kind of a process with `threads` threads on the same CPU."""
        faster = compute_thread_speedup(threads) / compute_thread_speedup(self.threads)
        return replace(
            self,
            threads=threads,
            bf16_flops=faster * self.bf16_flops,
            fp32_flops=faster * self.fp32_flops,
            memory_bytes_per_s=faster * self.memory_bytes_per_s,
        )


_LOST_PER_THREAD = 0.05
"""Fraction by which each further thread of a process lengthens the ideal time. Some work is not divided among
threads, and all threads wait for the last one after every operation."""


def compute_thread_speedup(threads: int) -> float:
    """Compute the speedup of a process on a CPU with several threads, each on its own core.

    The demo's PPO step is predicted to take 3.4 s with one thread. With two threads, it took 1.7 to 1.9 s (2-core
    AMD EPYC, torch 2.13). More threads have not been measured.
    """
    return threads / (1 + _LOST_PER_THREAD * (threads - 1))


# Host memory follows the vendors' own systems of eight devices: 1 TB in a DGX A100 with 320 GB, and 2 TB in a DGX
# A100 with 640 GB, a DGX H100, H200 or B200. Servers with L40S or RTX 4090 differ, so their number is a common,
# rather small size. The latency of an NVLink hop has the order that NCCL's tuning model assumes for its ring
# protocols (NCCL 2.18, src/graph/tuning.cc: 6.6 µs base for LL, 14 µs for simple, 0.6 to 1 µs per NVLink hop). The
# latency of a PCIe hop is that of a copy through host memory. Networks follow the vendors' eight-device systems,
# except for the A100: its cloud instances and clusters have 200 Gbit/s per node and more.
_NVLINK_HOP, _PCIE_HOP = 3e-6, 8e-6
_PCIE4, _PCIE5 = 32e9, 64e9

# NVIDIA A100 data sheet (SXM4): 312 / 19.5 TFLOP/s, 1,555 and 2,039 GB/s, NVLink 600 GB/s both ways.
_A100 = DeviceKind(
    name="a100-80g",
    memory_bytes=int(79.2 * _GIB),
    bf16_flops=312e12,
    fp32_flops=19.5e12,
    memory_bytes_per_s=2039e9,
    link_bytes_per_s=300e9,
    link_latency_s=_NVLINK_HOP,
    host_bytes_per_s=_PCIE4,
    host_memory_bytes=256 * _GB,
    node_bytes_per_s=25e9,
    measured="a100",
)
# NVIDIA H100 data sheet (SXM5): 989 / 67 TFLOP/s, 3.35 TB/s, NVLink 900 GB/s; DGX: 8 x 400 Gbit/s.
_H100 = DeviceKind(
    name="h100",
    memory_bytes=int(79.1 * _GIB),
    bf16_flops=989e12,
    fp32_flops=67e12,
    memory_bytes_per_s=3350e9,
    link_bytes_per_s=450e9,
    link_latency_s=_NVLINK_HOP,
    host_bytes_per_s=_PCIE5,
    host_memory_bytes=256 * _GB,
    node_bytes_per_s=400e9,
    groups_products=True,
    measured="h100",
)
_KINDS = (
    replace(
        _A100,
        name="a100-40g",
        memory_bytes=int(39.4 * _GIB),
        memory_bytes_per_s=1555e9,
        host_memory_bytes=128 * _GB,
    ),
    _A100,
    # The A100 with NVLink reduced to 400 GB/s both ways.
    replace(_A100, name="a800-80g", link_bytes_per_s=200e9),
    _H100,
    # NVIDIA H200 data sheet: as the H100, with 141 GB at 4.8 TB/s.
    replace(
        _H100,
        name="h200",
        memory_bytes=int(139.8 * _GIB),
        memory_bytes_per_s=4800e9,
        measured="h200",
    ),
    # NVIDIA HGX B200 data sheet, per device: 2.25 PFLOP/s dense, 75 TFLOP/s, 8 TB/s, NVLink 1.8 TB/s.
    replace(
        _H100,
        name="b200",
        memory_bytes=int(178.4 * _GIB),
        bf16_flops=2250e12,
        fp32_flops=75e12,
        memory_bytes_per_s=8000e9,
        link_bytes_per_s=900e9,
        measured="b200",
    ),
    # NVIDIA L40S data sheet: 362 / 91.6 TFLOP/s, 48 GB at 864 GB/s, PCIe 4 and no NVLink.
    DeviceKind(
        name="l40s",
        memory_bytes=int(44.4 * _GIB),
        bf16_flops=362e12,
        fp32_flops=91.6e12,
        memory_bytes_per_s=864e9,
        link_bytes_per_s=32e9,
        link_latency_s=_PCIE_HOP,
        host_bytes_per_s=_PCIE4,
        host_memory_bytes=96 * _GB,
        node_bytes_per_s=25e9,
        measured="l40s",
    ),
    # NVIDIA Ada white paper: 165 / 82.6 TFLOP/s, 24 GB at 1,008 GB/s. It lacks peer-to-peer access, so each message
    # crosses PCIe twice.
    DeviceKind(
        name="rtx-4090",
        memory_bytes=int(23.5 * _GIB),
        bf16_flops=165e12,
        fp32_flops=82.6e12,
        memory_bytes_per_s=1008e9,
        link_bytes_per_s=16e9,
        link_latency_s=_PCIE_HOP,
        host_bytes_per_s=_PCIE4,
        host_memory_bytes=32 * _GB,
        node_bytes_per_s=1.25e9,
    ),
    # A process with one thread, on a core of a 2-core AMD EPYC virtual machine, torch 2.13: 105 GFLOP/s in float32
    # and 325 in bfloat16. A small all-reduce of gloo over loopback takes about 1 ms. `realrl profile` replaces
    # these rough numbers.
    DeviceKind(
        name="cpu",
        memory_bytes=8 * _GIB,
        bf16_flops=325e9,
        fp32_flops=105e9,
        memory_bytes_per_s=10e9,
        link_bytes_per_s=3.5e9,
        link_latency_s=0.5e-3,
        host_bytes_per_s=10e9,
        host_memory_bytes=8 * _GB,
        node_bytes_per_s=1.25e9,
        node_latency_s=1e-3,
        kernel_s=10e-6,
        cpu=True,
        guessed=frozenset({"bf16_flops", "fp32_flops", "memory_bytes_per_s"}),
    ),
)
DEVICES: Mapping[str, DeviceKind] = MappingProxyType({kind.name: kind for kind in _KINDS})
"""Built-in kinds by name."""


def find_device_kind(name: str) -> DeviceKind:
    """Look up a built-in kind by name. Raises a UserError that lists all names if there is none."""
    if name not in DEVICES:
        hint = nearest(name, DEVICES)
        suffix = f"; did you mean {hint}?" if hint else ""
        raise UserError(f"device {name!r} is not known; known are {', '.join(DEVICES)}{suffix}")
    return DEVICES[name]


def find_gpu_kind(name: str) -> DeviceKind | None:
    """Look up the built-in kind of a GPU by torch's name for it, such as `NVIDIA A100-SXM4-80GB`, or return None.

    The result is None for PCIe and NVL cards, which lack the links of the built-in kinds. It is also None for MIG
    slices, which are only parts of a card.
    """
    words = re.split(r"[^A-Z0-9]+", name.upper())
    if {"PCIE", "NVL", "MIG"} & set(words):
        return None
    for kind in DEVICES.values():
        parts = kind.name.upper().split("-")
        if not kind.cpu and all(any(word.startswith(part) for word in words) for part in parts):
            return kind
    return None
