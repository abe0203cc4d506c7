"""Bars of a plan's page: the device time of a step, and the memory of devices against their capacity."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from realrl.cli.page.text import find_role_class, format_count, format_share, make_tip
from realrl.config.values import format_bytes
from realrl.planner.simulate.estimate import DeviceMemory, MemoryPart, PartKind
from realrl.program.text import format_ranks

if TYPE_CHECKING:
    from realrl.planner.report.report import PlanReport

TERMS: Mapping[str, str] = {
    "compute": "arithmetic of the model",
    "decode": "generation token by token, limited by memory bandwidth",
    "optimizer": "update of the parameters",
    "tensor": "communication between tensor-parallel devices that does not overlap with compute",
    "experts": "communication between expert-parallel devices that does not overlap with compute",
    "context": "communication between context-parallel devices that does not overlap with compute",
    "data": "communication between devices with the same parameters that does not overlap with compute",
    "pipeline": "messages between pipeline stages",
    "bubble": "pipeline stages that wait for other stages",
    "environment": "rows that wait for their environment, beyond what other rows hide",
    "launch": "devices that wait for their host",
    "function": "functions on hosts, in parallel with the devices",
    "reallocation": "parameters that move from one layout to another",
    "offload": "copies from and to host memory",
    "exchange": "data that one call passes to another",
    "idle": "devices without work, and devices that wait for others",
}
"""Meaning of each term of the cost model, in the order in which terms are drawn."""

_LETTER = 0.0085
"""Width of a letter, as a fraction of a bar's width."""
_VISIBLE = 1e-3
"""Parts of a step outside the calls get a bar if they exceed this fraction of the step's device time."""
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
"""Memory parts that belong to no role, in the order of their bars. Each has its own colour."""
_OF_ROLES = {
    "parameters": "parameters",
    "copy": "a copy in another layout",
    "state": "gradients and optimizer",
}
"""Meaning of each CSS class of a role's memory parts."""


@dataclass(frozen=True)
class Segment:
    """A part of a bar."""

    percent: float
    look: str
    tip: str
    label: str = ""
    """Label; empty if there is no room."""


@dataclass(frozen=True)
class Bar:
    """A stacked bar."""

    name: str
    segments: tuple[Segment, ...]
    value: str
    call: str = ""
    """Call of the bar; empty for none."""


@dataclass(frozen=True, kw_only=True)
class Card:
    """Memory of the fullest device among the devices that execute the same calls."""

    title: str
    detail: str
    bars: tuple[Bar, ...]
    capacity: float
    """Position of the capacity, in percent of the width."""
    fits: bool


def make_time_bars(report: "PlanReport") -> list[Bar]:
    """Make bars of device-seconds: a bar for the whole step, then bars for its parts, on another scale."""
    estimate = report.chosen
    whole = estimate.step_seconds * len(estimate.slices)
    parts: dict[str, dict[str, float]] = {}
    for name, call in estimate.calls.items():
        if not call.call.is_function:  # a function takes no device's time
            parts[name] = {term: seconds * call.placement.mesh.size for term, seconds in call.terms.items()}
    for term in ("reallocation", "offload", "exchange", "idle"):
        if estimate.terms[term] > _VISIBLE * whole:
            parts[term] = {term: estimate.terms[term]}
    longest = max(sum(terms.values()) for terms in parts.values())
    bars = [Bar("whole step", _segments("all devices", estimate.terms, whole, whole, labelled=True), "100 %")]
    for name, terms in parts.items():
        segments = _segments(name, terms, longest, whole, labelled=False)
        share = format_share(sum(terms.values()) / whole)
        bars.append(Bar(name, segments, share, name if name in estimate.calls else ""))
    return bars


def _segments(
    name: str, terms: Mapping[str, float], longest: float, whole: float, *, labelled: bool
) -> tuple[Segment, ...]:
    """Divide a bar whose full width is `longest` device-seconds."""
    found = []
    for term in sort_terms(terms):
        share = format_share(terms[term] / whole)
        label = f"{term} {share}"
        fits = labelled and terms[term] / whole > len(label) * _LETTER
        facts = [
            ("device time", f"{format_count(terms[term])} device-seconds"),
            ("of the step", share),
            ("is", TERMS.get(term, "")),
        ]
        tip = make_tip(f"{name}: {term}", facts)
        found.append(Segment(100 * terms[term] / longest, f"term {term}", tip, label if fits else ""))
    return tuple(found)


def sort_terms(terms: Mapping[str, float]) -> list[str]:
    """Sort the terms that take any time, in the order of `TERMS`."""
    used = [term for term, seconds in terms.items() if seconds > 0]
    return sorted(used, key=lambda term: list(TERMS).index(term) if term in TERMS else len(TERMS))


def list_terms(report: "PlanReport") -> list[tuple[str, str]]:
    """List the terms that take any time, with their meaning."""
    return [(term, TERMS.get(term, "")) for term in sort_terms(report.chosen.terms)]


def list_phases(device: DeviceMemory) -> dict[str, Mapping[MemoryPart, int]]:
    """Map "between steps" and each call to the memory parts of a device when the call needs most memory."""
    phases: dict[str, Mapping[MemoryPart, int]] = {"between steps": device.resident}
    for footprint in device.footprints:
        if sum(phases.get(footprint.during, {}).values()) <= footprint.bytes:
            phases[footprint.during] = footprint.parts
    return phases


def make_memory_cards(report: "PlanReport") -> list[Card]:
    """Make one card for each set of devices that execute the same calls, in the order of the devices."""
    alike: dict[tuple[object, ...], list[DeviceMemory]] = {}
    for device in report.chosen.memory:
        kind = report.scenario.spec.device(device.rank).name
        key = (kind, device.capacity, *dict.fromkeys(f.during for f in device.footprints))
        alike.setdefault(key, []).append(device)
    most = max(max(d.capacity, d.peak.bytes) for d in report.chosen.memory)
    return [_card(report, devices, most) for devices in alike.values()]


def _card(report: "PlanReport", devices: list[DeviceMemory], most: int) -> Card:
    fullest = max(devices, key=lambda device: device.peak.bytes)
    ranks = format_ranks([device.rank for device in devices]).replace("-", "–").replace(",", ", ")
    detail = f"device {fullest.rank} is the fullest of {len(devices)}: " if len(devices) > 1 else ""
    phases = list_phases(fullest).items()
    return Card(
        title=f"device{'s' if len(devices) > 1 else ''} {ranks}",
        detail=f"{detail}{format_bytes(fullest.peak.bytes)} of {format_bytes(fullest.capacity)}",
        bars=tuple(_memory_bar(report, name, parts, most, fullest.capacity) for name, parts in phases),
        capacity=100 * fullest.capacity / most,
        fits=fullest.peak.bytes <= fullest.capacity,
    )


def _memory_bar(
    report: "PlanReport", name: str, parts: Mapping[MemoryPart, int], most: int, capacity: int
) -> Bar:
    segments = []
    roles = report.scenario.graph.roles

    def order(part: MemoryPart) -> tuple[int, int]:
        if part.role is not None:
            return roles.index(part.role), list(_OF_ROLES).index(_what(part))
        return len(roles), _OF_CALLS.index(part.kind)

    for part in sorted((part for part, size in parts.items() if size), key=order):
        share = format_share(parts[part] / capacity)
        facts = [("holds", format_bytes(parts[part])), ("of the device", share), ("in", name)]
        segments.append(Segment(100 * parts[part] / most, _look(report, part), make_tip(str(part), facts)))
    call = name if name in report.chosen.calls else ""
    return Bar(name, tuple(segments), format_bytes(sum(parts.values())), call)


def list_memory_parts(report: "PlanReport") -> list[tuple[str, str]]:
    """List the legend of the memory bars: the meaning and the CSS class of each colour."""
    phases = [parts for device in report.chosen.memory for parts in list_phases(device).values()]
    looks = {_look(report, part) for parts in phases for part in parts}
    roles = [(role, find_role_class(report, role)) for role in report.scenario.graph.roles]
    of_roles = [
        (text, f"r7 {what}") for what, text in _OF_ROLES.items() if any(look.endswith(what) for look in looks)
    ]
    of_calls = [(kind.value, f"part {kind}") for kind in _OF_CALLS if f"part {kind}" in looks]
    return [*roles, *of_roles, *of_calls]


def _look(report: "PlanReport", part: MemoryPart) -> str:
    return f"part {part.kind}" if part.role is None else f"{find_role_class(report, part.role)} {_what(part)}"


def _what(part: MemoryPart) -> str:
    """Find the CSS class of a role's part, a key of `_OF_ROLES`."""
    if part.kind is PartKind.OPTIMIZER:
        return "state"
    return "parameters" if part.copy is None and not part.host else "copy"
