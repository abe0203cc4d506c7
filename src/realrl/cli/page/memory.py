"""Bars of the memory that devices hold in the course of a step, against their capacity."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from realrl.cli.page.sections import Bar, Segment
from realrl.cli.page.text import format_share
from realrl.cli.page.tips import find_role_class, make_tip
from realrl.config.units import format_bytes
from realrl.planner.simulate.estimate import DeviceMemory
from realrl.program.text import format_ranks

if TYPE_CHECKING:
    from realrl.planner.report.report import PlanReport

_KNOWN = ("cache", "activations", "logits", "fragmentation")
"""Memory parts that belong to no role and have a colour of their own."""

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
    names = {name for parts in [*found, *(d.resident for d in report.chosen.memory)] for name in parts}
    looks = {_look(report, name) for name in names}
    roles = [(role, find_role_class(report, role)) for role in report.scenario.graph.roles]
    whats = [
        (text, f"r7 {what}") for what, text in _WHATS.items() if any(look.endswith(what) for look in looks)
    ]
    return [
        *roles,
        *whats,
        *((part, f"part {part}") for part in (*_KNOWN, "other") if f"part {part}" in looks),
    ]


def _card(report: "PlanReport", devices: list[DeviceMemory], most: int) -> Card:
    fullest = max(devices, key=lambda device: device.peak.bytes)
    phases: dict[str, Mapping[str, int]] = {"between steps": fullest.resident}
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


def _bar(report: "PlanReport", name: str, parts: Mapping[str, int], most: int, capacity: int) -> Bar:
    segments = []
    for part in _ordered(report, parts):
        share = format_share(parts[part] / capacity)
        facts = [("holds", format_bytes(parts[part])), ("of the device", share), ("in", name)]
        segments.append(Segment(100 * parts[part] / most, _look(report, part), make_tip(part, facts)))
    call = name if name in report.chosen.calls else ""
    return Bar(name, tuple(segments), format_bytes(sum(parts.values())), call)


def _ordered(report: "PlanReport", parts: Mapping[str, int]) -> list[str]:
    """Sort the memory parts that take any bytes: by role, then temporary ones."""
    roles = report.scenario.graph.roles

    def place(name: str) -> tuple[int, int]:
        role = _role(report, name)
        if role is not None:
            return roles.index(role), list(_WHATS).index(_look(report, name).split()[1])
        return len(roles), _KNOWN.index(name) if name in _KNOWN else len(_KNOWN)

    return sorted((part for part, size in parts.items() if size), key=place)


def _look(report: "PlanReport", part: str) -> str:
    role = _role(report, part)
    if role is not None:
        what = "parameters" if part == f"{role} parameters" else "copy" if "parameters" in part else "state"
        return f"{find_role_class(report, role)} {what}"
    return f"part {part if part in _KNOWN else 'other'}"


def _role(report: "PlanReport", part: str) -> str | None:
    return next((role for role in report.scenario.graph.roles if part.startswith(f"{role} ")), None)
