"""Bars of the memory that devices hold in the course of a step, against their capacity."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from realrl.cli.page.sections import Bar, Segment
from realrl.cli.page.text import format_share
from realrl.cli.page.tips import find_role_class, make_tip
from realrl.config.values import format_bytes
from realrl.planner.simulate.estimate import DeviceMemory, MemoryPart, PartKind
from realrl.program.text import format_ranks

if TYPE_CHECKING:
    from realrl.planner.report.report import PlanReport

_OF_CALLS = (
    PartKind.CACHE,
    PartKind.PACKED_WEIGHTS,
    PartKind.GRAPHS,
    PartKind.ACTIVATIONS,
    PartKind.GATHERED,
    PartKind.LOGITS,
    PartKind.FRAGMENTATION,
    PartKind.COMMUNICATORS,
)
"""Memory parts that belong to no role, in the order of their bars; each has a colour of its own."""

_WHATS = {"parameters": "parameters", "copy": "a copy in another layout", "state": "gradients and optimizer"}
"""CSS class of a memory part of a role -> meaning."""


@dataclass(frozen=True)
class Card:
    """Memory of the fullest device among those that take part in the same calls."""

    title: str
    detail: str
    bars: tuple[Bar, ...]
    capacity: float
    """Percent of the width at which the capacity lies."""
    fits: bool


def make_memory_cards(report: "PlanReport") -> list[Card]:
    """Make one card for each set of devices that take part in the same calls, in the order of the devices."""
    alike: dict[tuple[object, ...], list[DeviceMemory]] = {}
    for device in report.chosen.memory:
        kind = report.scenario.spec.device(device.rank).name
        key = (kind, device.capacity, *dict.fromkeys(f.during for f in device.footprints))
        alike.setdefault(key, []).append(device)
    most = max(max(d.capacity, d.peak.bytes) for d in report.chosen.memory)
    return [_card(report, devices, most) for devices in alike.values()]


def list_parts(report: "PlanReport") -> list[tuple[str, str]]:
    """List the colours of the bars with their CSS classes and meaning."""
    found = [f.parts for device in report.chosen.memory for f in device.footprints]
    held = {part for parts in [*found, *(d.resident for d in report.chosen.memory)] for part in parts}
    looks = {_look(report, part) for part in held}
    roles = [(role, find_role_class(report, role)) for role in report.scenario.graph.roles]
    whats = [
        (text, f"r7 {what}") for what, text in _WHATS.items() if any(look.endswith(what) for look in looks)
    ]
    return [
        *roles,
        *whats,
        *((kind.value, f"part {kind}") for kind in _OF_CALLS if f"part {kind}" in looks),
    ]


def _card(report: "PlanReport", devices: list[DeviceMemory], most: int) -> Card:
    fullest = max(devices, key=lambda device: device.peak.bytes)
    phases: dict[str, Mapping[MemoryPart, int]] = {"between steps": fullest.resident}
    for footprint in fullest.footprints:
        earlier = phases.get(footprint.during, {})
        if sum(earlier.values()) <= footprint.bytes:
            phases[footprint.during] = footprint.parts
    ranks = format_ranks([device.rank for device in devices]).replace("-", "–").replace(",", ", ")
    title = f"device{'s' if len(devices) > 1 else ''} {ranks}"
    peak = fullest.peak
    detail = f"device {fullest.rank} is the fullest of {len(devices)}: " if len(devices) > 1 else ""
    detail += f"{format_bytes(peak.bytes)} of {format_bytes(fullest.capacity)}"
    bars = [_bar(report, name, parts, most, fullest.capacity) for name, parts in phases.items()]
    fits = peak.bytes <= fullest.capacity
    return Card(
        title=title, detail=detail, bars=tuple(bars), capacity=100 * fullest.capacity / most, fits=fits
    )


def _bar(report: "PlanReport", name: str, parts: Mapping[MemoryPart, int], most: int, capacity: int) -> Bar:
    segments = []
    for part in _ordered(report, parts):
        share = format_share(parts[part] / capacity)
        facts = [("holds", format_bytes(parts[part])), ("of the device", share), ("in", name)]
        segments.append(Segment(100 * parts[part] / most, _look(report, part), make_tip(str(part), facts)))
    call = name if name in report.chosen.calls else ""
    return Bar(name, tuple(segments), format_bytes(sum(parts.values())), call)


def _ordered(report: "PlanReport", parts: Mapping[MemoryPart, int]) -> list[MemoryPart]:
    """Sort the memory parts that take any bytes: by role, then temporary ones."""
    roles = report.scenario.graph.roles

    def place(part: MemoryPart) -> tuple[int, int]:
        if part.role is not None:
            return roles.index(part.role), list(_WHATS).index(_what(part))
        return len(roles), _OF_CALLS.index(part.kind)

    return sorted((part for part, size in parts.items() if size), key=place)


def _look(report: "PlanReport", part: MemoryPart) -> str:
    """Find the CSS classes of a part."""
    if part.role is None:
        return f"part {part.kind}"
    return f"{find_role_class(report, part.role)} {_what(part)}"


def _what(part: MemoryPart) -> str:
    """Find the CSS class of a role's part, one of `_WHATS`."""
    if part.kind is PartKind.OPTIMIZER:
        return "state"
    return "parameters" if part.copy is None and not part.host else "copy"
