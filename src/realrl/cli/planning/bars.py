"""Bars of characters: the memory of devices, and the terms of their time."""

from collections.abc import Mapping

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from realrl.cli.page.text import find_largest, format_share
from realrl.config.values import format_bytes
from realrl.planner.cluster.cluster_spec import ClusterSpec
from realrl.planner.report.shortage_text import describe_full_device
from realrl.planner.simulate.estimate import DeviceMemory, Estimate, MemoryPart, PartKind

_Parts = Mapping[MemoryPart, int]
_WIDTH = 30
_SMALL = 0.01
"""Fraction of the devices' time; terms below are added up."""
_REST = "activations and the rest"
KINDS: Mapping[str, str] = {
    PartKind.PARAMETERS: "█",
    PartKind.OPTIMIZER: "▓",
    PartKind.CACHE: "▒",
    _REST: "░",
}
"""Kind of memory -> the character of its bar; copies elsewhere and on the host are part of the rest."""


def format_time_bars(estimate: Estimate) -> Table:
    """Format a line for each term of the devices' time, the largest first."""
    total = sum(estimate.terms.values())
    shares = {name: seconds / total for name, seconds in estimate.terms.items()}
    named = {name: share for name, share in shares.items() if share >= _SMALL}
    named = dict(sorted(named.items(), key=lambda item: -item[1]))
    rest = 1 - sum(named.values())
    rows = Table.grid(padding=(0, 2))
    for name, share in {**named, **({"everything else": rest} if rest > _SMALL / 10 else {})}.items():
        rows.add_row(name, Text(format_share(share), justify="right"), "█" * max(1, round(share * _WIDTH)))
    return rows


def format_memory_bars(estimate: Estimate, spec: ClusterSpec) -> RenderableType:
    """Format a line for each phase of the fullest device of each group of nodes."""
    parts: list[RenderableType] = []
    first = 0
    for group in spec.groups:
        own = estimate.memory[first : first + group.size]
        first += group.size
        fullest = max(own, key=lambda device: device.peak.bytes / device.capacity)
        parts += [
            Text(f"device {fullest.rank}, {group.device.name}, {format_bytes(fullest.capacity)} to use")
        ]
        parts += [_device(fullest)]
        if fullest.peak.bytes > fullest.capacity:
            parts.append(Text(f"does not fit: {describe_full_device(fullest)}"))
    legend = "   ".join(f"{character} {kind}" for kind, character in KINDS.items())
    return Group(*parts, Text(legend, style="dim"))


def _device(device: DeviceMemory) -> Table:
    rows = Table.grid(padding=(0, 2))
    rows.add_column(no_wrap=True)
    rows.add_column(no_wrap=True)
    phases = [(f.during, f.parts) for f in device.footprints]
    for name, parts in [("between steps", device.resident), *_largest_of_each(phases)]:
        most = find_largest(parts) if parts else None
        rows.add_row(
            name,
            _bar(parts, device.capacity),
            Text(format_bytes(sum(parts.values())), justify="right"),
            f"{most} {format_bytes(parts[most])}" if most is not None else "",
        )
    return rows


def _largest_of_each(
    phases: list[tuple[str, Mapping[MemoryPart, int]]],
) -> list[tuple[str, Mapping[MemoryPart, int]]]:
    """Keep the largest of the entries with the same name."""
    found: dict[str, _Parts] = {}
    for name, parts in phases:
        if name not in found or sum(parts.values()) > sum(found[name].values()):
            found[name] = parts
    return list(found.items())


def _bar(parts: _Parts, capacity: int) -> str:
    """Draw a bar as long as the device is full; dots are free. Overflow is cut off at `>`."""
    bar, before, position = "", 0.0, 0
    for kind, character in KINDS.items():
        before += sum(size for part, size in parts.items() if _kind(part) == kind) / capacity
        end = round(before * _WIDTH)
        bar += character * (end - position)
        position = end
    return bar.ljust(_WIDTH, "·") if before <= 1 else bar[: _WIDTH - 1] + ">"


def _kind(part: MemoryPart) -> str:
    """Find the kind of a memory part."""
    is_copy = part.copy is not None or part.host
    return part.kind if part.kind in KINDS and not is_copy else _REST
