"""Figures of device kinds beside their data sheets, and of device memory that no plan may use."""

import math
from dataclasses import replace

import pytest

from realrl.config.errors import UserError
from realrl.plan.placement import Mesh, Placement, Strategy
from realrl.planner.cluster.cluster_spec import ClusterSpec
from realrl.planner.cluster.devices import DEVICES, DeviceKind, compute_thread_speedup
from realrl.planner.memory.call_memory import MemoryModel
from realrl.planner.operators.tables import place_collective, place_decode, place_prefill, place_product
from realrl.planner.profile.profile import Profile
from realrl.planner.workload.strategies import Strategies
from realrl.runtime.measure.performance import find_peak_bandwidth, find_peak_flops
from tests.planner.unit_device import place, store

GIB, MIB = 1 << 30, 1 << 20

SHEETS = {
    # TFLOP/s in bfloat16 and float32; GB/s of memory, of links to other devices, of PCIe and of a node's network;
    # GiB that the driver reports; GB of host memory per device.
    "a100-40g": (312, 19.5, 1555, 300, 32, 25, 39.4, 128),
    "a100-80g": (312, 19.5, 2039, 300, 32, 25, 79.2, 256),
    "a800-80g": (312, 19.5, 2039, 200, 32, 25, 79.2, 256),
    "h100": (989, 67, 3350, 450, 64, 400, 79.1, 256),
    "h200": (989, 67, 4800, 450, 64, 400, 139.8, 256),
    "b200": (2250, 75, 8000, 900, 64, 400, 178.4, 256),
    "l40s": (362, 91.6, 864, 32, 32, 25, 44.4, 96),
    "rtx-4090": (165, 82.6, 1008, 16, 32, 1.25, 23.5, 32),
    "cpu": (0.325, 0.105, 10, 3.5, 10, 1.25, 8, 8),
}


def describe(kind: DeviceKind) -> tuple[float, ...]:
    rates = (kind.memory_bytes_per_s, kind.link_bytes_per_s, kind.host_bytes_per_s, kind.node_bytes_per_s)
    flops = kind.bf16_flops / 1e12, kind.fp32_flops / 1e12
    return *flops, *(rate / 1e9 for rate in rates), kind.memory_bytes / GIB, kind.host_memory_bytes / 1e9


def test_figures_are_those_of_data_sheets() -> None:
    assert set(SHEETS) == set(DEVICES)
    for name, sheet in SHEETS.items():
        assert describe(DEVICES[name]) == pytest.approx(sheet, rel=1e-6), name


def test_latencies_are_those_of_nvlink_pcie_and_a_network() -> None:
    for name, kind in DEVICES.items():
        inside = {"l40s": 8e-6, "rtx-4090": 8e-6, "cpu": 0.5e-3}.get(name, 3e-6)
        assert (kind.link_latency_s, kind.node_latency_s) == (inside, 1e-3 if kind.cpu else 10e-6)


def test_threads_of_a_process_lose_a_twentieth_each() -> None:
    assert [compute_thread_speedup(n) for n in (1, 2, 4)] == [1, 2 / 1.05, 4 / 1.15]
    one = DEVICES["cpu"]
    two = one.with_threads(2)
    assert two.with_threads(1) == one and two.threads == 2
    for name in ("bf16_flops", "fp32_flops", "memory_bytes_per_s"):
        assert getattr(two, name) == pytest.approx(getattr(one, name) * 2 / 1.05)


def test_peaks_are_those_of_the_data_sheet_or_of_a_profile() -> None:
    h100, cpu = DEVICES["h100"], DEVICES["cpu"]
    assert find_peak_flops(h100, "bfloat16") == find_peak_flops(h100, "mixed") == 989e12
    assert find_peak_flops(h100, "float32") == 67e12 and find_peak_bandwidth(h100) == 3350e9
    assert find_peak_flops(cpu, "float32") is None and find_peak_bandwidth(cpu) is None
    profile = Profile(device="cpu", software={}, threads=2)
    assert find_peak_flops(cpu, "float32", profile) is None


def test_a_gpu_lends_memory_to_drivers_messages_and_all_ranks() -> None:
    """0.6 GiB, four buffers of 64 MiB, and channels of a communicator with every device of the node.

    Eight channels of a ring with two neighbours of the node (12 MiB each) and buffers of NVLink SHARP for eight
    members (2 MiB each); and for messages one with each of seven others.
    """
    spec = ClusterSpec.parse("h100:1x8")
    ring, messages = 8 * (12 * 2 + 2 * 8), 8 * 12 * 7
    lent = int(0.6 * GIB) + 4 * 64 * MIB + (ring + messages) * MIB
    assert MemoryModel(spec).capacity(3) == int(79.1 * GIB) - lent
    # Between nodes, a neighbour here and one there (20 MiB), and messages with two channels per peer and shared
    # buffers (4 MiB).
    ring, messages = 8 * (12 + 20 + 2 * 8), 2 * 12 * 7 + 8 * 4
    lent = int(0.6 * GIB) + 4 * 64 * MIB + (ring + messages) * MIB
    assert MemoryModel(ClusterSpec.parse("h100:4x8")).capacity(30) == int(79.1 * GIB) - lent
    assert (
        MemoryModel(ClusterSpec.parse("h100:1x1")).capacity(0) == int(79.1 * GIB) - int(0.6 * GIB) - 256 * MIB
    )
    # On a CPU there are eight buffers of 8 MiB for messages, and nothing else.
    assert MemoryModel(ClusterSpec.parse("cpu:1x2")).capacity(0) == 8 * GIB - 64 * MIB


def test_a_device_with_memory_for_nothing_but_drivers_is_refused() -> None:
    (group,) = ClusterSpec.parse("cpu:1x2").groups

    def make(memory: int) -> ClusterSpec:
        return ClusterSpec("", (replace(group, device=replace(group.device, memory_bytes=memory)),))

    assert MemoryModel(make(64 * MIB + 1)).capacity(0) == 1
    with pytest.raises(UserError, match=r"cpu: .* is less than drivers and message buffers need"):
        MemoryModel(make(64 * MIB))


def test_host_memory_is_that_of_a_node_without_its_processes() -> None:
    spec = ClusterSpec.parse("h100:2x8+l40s:1x8")
    model = MemoryModel(spec)
    assert [model.host_capacity(n) for n in range(3)] == [8 * (256e9 - 4 * GIB)] * 2 + [8 * (96e9 - 4 * GIB)]
    assert MemoryModel(ClusterSpec.parse("cpu:1x2")).host_capacity(0) == math.inf


def test_communicators_of_a_layout_have_channels_with_their_neighbours() -> None:
    """Channels: 16 for tensor and data parallelism, 4 for pipelines and whole meshes."""
    model = MemoryModel(ClusterSpec.parse("h100:2x8"))

    def count(*placements: Placement) -> float:
        return model.communicators(placements) / MIB

    assert count(place(1)) == 0
    assert count(place(2)) == count(place(1, 2)) == 16 * 12
    assert count(place(4)) == 16 * (2 * 12 + 4 * 2)
    tensor_and_data = 16 * 12 + 16 * 12
    assert count(place(2, 2)) == tensor_and_data + 4 * (2 * 12 + 4 * 2)
    # Two stages: a ring of two, and messages with the other one, which it has one of.
    assert count(place(1, 1, 2)) == 4 * 12 + 4 * 12
    assert count(place(1, 1, 4)) == 4 * (2 * 12 + 4 * 2) + 4 * 12 * 2 + 4 * 12
    across = 16 * (12 + 20 + 8 * 2)
    assert count(place(16)) == across
    # A member on each of two nodes, and the mesh of both.
    assert count(place(2, 8)) == 16 * (2 * 12 + 8 * 2) + 16 * 20 + 4 * (12 + 20 + 8 * 2)
    pipeline = 4 * 20 + 4 * 4
    assert count(place(1, 8, 2)) == 16 * (2 * 12 + 8 * 2) + pipeline + 4 * (12 + 20 + 8 * 2)
    # Equal layouts share theirs, whatever their micro-batches.
    assert count(place(4), place(4, tokens=7)) == count(place(4))
    elsewhere = Placement(Mesh(8, 4), Strategy(dp=4))
    assert count(place(4), elsewhere, place(1, 4)) == 3 * count(place(4))


def test_stored_state_is_that_of_the_fullest_stage_and_padded_for_data_ranks() -> None:
    model = MemoryModel(ClusterSpec.parse("h100:1x8"))
    layer, table = 256 * 64 + 64 * 128 + 320 * 64 + 64 * 160 + 2 * 64, 960 * 64
    whole = 4 * layer + 2 * table + 64
    assert model.parameters(store(), place(1)) == 2 * whole
    assert model.parameters(store(), place(3)) == 2 * whole  # divisible
    assert model.parameters(store(), place(7)) == 2 * (whole + -whole % 7)
    assert model.parameters(store(), place(1, 1, 2)) == 2 * (2 * layer + table + 64)
    # Gradients, and two moments and masters; with other ranks reduced gradients as well.
    for of, at, freed, copied in (
        (store(), place(1), 4 + 12, 12),
        (store(), place(2), 4 + 16 // 2, 12 // 2),
        (store(dtype="float32"), place(2), 4 + 12 // 2, 8 // 2),
    ):
        assert model.states(of, Strategies.of([at.strategy])) == (freed * whole, copied * whole)
    strategies = Strategies.of([place(1, 1, 2).strategy])
    assert model.largest_sets(store(), strategies) == {"base": 2 * (2 * layer + table + 64)}
    assert model.least_base_bytes(store(), strategies)[0] == 2 * (2 * layer + table)


def test_bounds_of_operators_are_arithmetic_or_traffic_and_a_kernel_that_does_nothing() -> None:
    """Two microseconds, and a second for each operation or byte."""
    slow = replace(DEVICES["h100"], bf16_flops=1.0, memory_bytes_per_s=math.inf, link_bytes_per_s=1.0)
    wide = replace(DEVICES["h100"], bf16_flops=math.inf, memory_bytes_per_s=1.0)

    def bounds(place, *sizes: float, window: int | None = None) -> tuple[float, float]:
        more = {} if window is None else {"window": window}
        return tuple(place(device, *sizes, **more).bound - 2e-6 for device in (slow, wide))

    assert bounds(place_product, 3, 5, 7) == pytest.approx((2 * 105, 2 * (21 + 35 + 15)))
    # Two sequences of 300 tokens, 8 heads that share 2: half of the scores, twice; queries, keys, values, outputs.
    squares = 2 * 300**2
    assert bounds(place_prefill, 600, squares, 8, 2, 16) == pytest.approx(
        (2 * squares * 128, 2 * 2 * 600 * 160)
    )
    # A block of 128 keys is read where a window of 22 begins.
    seen = squares - 2 * 150**2
    assert bounds(place_prefill, 600, squares, 8, 2, 16, window=22)[0] == pytest.approx(2 * seen * 128)
    assert bounds(place_decode, 3, 300, 8, 2, 16) == pytest.approx((4 * 3 * 300 * 128, 2 * 2 * 3 * 300 * 32))
    assert bounds(place_decode, 3, 300, 8, 2, 16, window=22)[0] == pytest.approx(4 * 3 * 150 * 128)
    assert place_collective(slow, 2, 4, 100.0).bound == pytest.approx(2e-6 + 2 * 75)
    assert place_decode(slow, 3, 300, 8, 2, 16).sizes == (300, 6, 4, 16)
    assert place_prefill(slow, 600, squares, 8, 2, 16).sizes == (300, 16, 4, 16)
    assert place_collective(slow, 2, 4, 100.0).sizes == (4, 100) and place_product(slow, 3, 5, 7).sizes == (
        3,
        5,
        7,
    )
