"""Text form of memory shortages."""

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from realrl.config.values import format_bytes
from realrl.dataflow.call import Kind
from realrl.planner.simulate.estimate import DeviceMemory, Estimate, MemoryPart, NodeMemory, PartKind

if TYPE_CHECKING:
    # These modules load numpy, but pages of plans are written without it.
    from realrl.planner.search.shortage import Shortage
    from realrl.planner.simulate.scenario import Scenario


def describe_shortage(scenario: "Scenario", shortage: "Shortage") -> str:
    """Describe a shortage that a search has met. `_describe` shows the wording."""
    if shortage.node is not None:
        return _describe_host(shortage.node, shortage.needed_bytes, shortage.limit_bytes)
    call = scenario.graph.call(shortage.call)
    need = scenario.memory.call(call, scenario.models[call.model_role], shortage.placement, scenario.workload)
    parts = Counter({MemoryPart(PartKind(name)): size for name, size in need.dynamic.items()})
    parts[MemoryPart(PartKind.PARAMETERS, call.role)] = need.static["parameters"]
    parts[MemoryPart(PartKind.OPTIMIZER, call.role)] = need.static_bytes - need.static["parameters"]
    for role, kept in shortage.resident_bytes.items():
        if role != call.role or call.kind is not Kind.TRAIN:
            kind = PartKind.TRAINING if scenario.graph.trained(role) else PartKind.PARAMETERS
            parts[MemoryPart(kind, role)] += int(kept)
    return _describe(shortage.rank, shortage.needed_bytes, shortage.limit_bytes, call.name, parts)


def describe_full_device(memory: DeviceMemory) -> str:
    """Describe the shortage of a device under an estimated plan. `_describe` shows the wording."""
    peak = memory.peak
    return _describe(memory.rank, peak.bytes, memory.capacity, peak.during, peak.parts)


def describe_full_host(memory: NodeMemory) -> str:
    """Describe the shortage of a node's host under an estimated plan."""
    return _describe_host(memory.node, memory.bytes, memory.capacity)


def describe_misfit(estimate: Estimate) -> str:
    """Describe why an estimated plan does not fit. The text is about a full host, or about the peak device if no
    host is full."""
    full = estimate.full_host
    return describe_full_device(estimate.peak_device) if full is None else describe_full_host(full)


def _describe_host(node: int, needed: float, capacity: float) -> str:
    return (
        f"the host of node {node} needs {format_bytes(needed)} of {format_bytes(max(0, capacity))} for what is"
        " offloaded"
    )


def _describe(rank: int, needed: float, capacity: float, during: str, parts: Mapping[MemoryPart, int]) -> str:
    """Name the device, the call and the largest part.

    For example `device 0 needs 93 GiB of 79 GiB during actor.train, 51 GiB of it activations`.
    """
    largest = max(parts, key=lambda part: parts[part])
    return (
        f"device {rank} needs {format_bytes(needed)} of {format_bytes(capacity)} during {during},"
        f" {format_bytes(parts[largest])} of it {largest}"
    )
