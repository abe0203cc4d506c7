"""Plans as text for `realrl show`: the placement of calls, reallocations, and the memory of devices."""

import inspect
from collections.abc import Hashable, Iterator, Sequence
from typing import TypeVar

from realrl.cli.page.text import align_columns
from realrl.config.values import format_bytes
from realrl.dataflow.call import Call, Kind
from realrl.dataflow.graph import DataflowGraph
from realrl.layout.layout import build_layout
from realrl.layout.routing.routes import reallocate
from realrl.layout.sets import element_width
from realrl.plan.cluster import Cluster
from realrl.plan.placement import ELEMENT_BYTES
from realrl.plan.plan import Plan
from realrl.plan.presets import PRESETS, SEARCH
from realrl.planner.simulate.estimate import DeviceMemory, Footprint, MemoryPart, PartKind
from realrl.program.instructions import Program, Reallocate, Run
from realrl.program.lower import waves
from realrl.program.memory import Memory
from realrl.program.text import format_ranks, name_parameters
from realrl.runtime.prepare.job import Job, Phase

_WIDTH = 110
"""Maximum columns of a line. A wider picture continues below."""
_SHORT = {Kind.GENERATE: "gen", Kind.INFERENCE: "inf"}

Value = TypeVar("Value", bound=Hashable)


def explain_plan(name: str) -> str:
    """Describe a preset and the origin of its strategy. For a plan file, return only its name."""
    if name == SEARCH:
        return f"{SEARCH}: a plan that the planner found\n"
    if name not in PRESETS:
        return f"plan file {name}\n"
    return f"{name}: {inspect.getdoc(PRESETS[name])}\n"


def format_plan(plan: Plan, graph: DataflowGraph) -> str:
    """Format a table with a line per call, in the order in which calls run."""
    named = (axis for place in plan.placements.values() for axis in place.strategy.all_degrees.named())
    axes = [*dict.fromkeys(named)]
    rows = [["call", "mesh", *axes, "micro-batch tokens"]]
    for call in graph.order:
        s, mesh = plan[call.name].strategy, str(plan[call.name].mesh)
        if call.is_function:
            rows.append([call.name, mesh, str(s.dp), *["-"] * len(axes), "function on the host"])
        else:
            degrees = [str(s.all_degrees[axis]) for axis in axes]
            rows.append([call.name, mesh, *degrees, str(s.micro_batch_tokens), ", ".join(s.settings)])
    roles = {"offload": plan.offload, "offload optimizer": plan.offload_optimizer, "keep": plan.keep}
    extra = [f"{what}: {', '.join(names)}" for what, names in roles.items() if names]
    return "\n".join([*align_columns(rows), *extra]) + "\n"


def draw_phase(phase: Phase, job: Job) -> str:
    """Draw devices as rows and time as columns. Calls in the same column run at the same time.

    A function starts in its column, and may run longer.
    """
    columns = waves(phase.graph, phase.plan)
    rows: list[tuple[str, ...]] = []
    for rank in range(phase.plan.cluster.size):
        rests = ", ".join(_resting(job, rank))
        cells = []
        for calls in columns:
            here = [call for call in calls if rank in phase.plan[call.name].ranks]
            device = [_cell(phase.plan, call) for call in here if not call.is_function]
            host = [f"{call.name} on the host" for call in here if call.is_function]
            cells.append(" + ".join([*(device or [f"- ({rests})" if rests else "-"]), *host]))
        rows.append(tuple(cells))
    lines = []
    for first, last in _fold(rows):
        table = [["devices", *(str(number + 1) for number in range(first, last))]]
        table += [[devices, *cells[first:last]] for devices, cells in group_alike(rows)]
        lines += [*align_columns(table), ""]
    return "\n".join([*lines, "- is idle; in brackets, the roles whose parameters stay on the device"]) + "\n"


def _cell(plan: Plan, call: Call) -> str:
    is_plain = call.name == f"{call.role}.{call.kind}" and call.kind in _SHORT
    name = f"{call.role}.{_SHORT[call.kind]}" if is_plain else call.name
    return f"{name} {plan[call.name].layout.partition(' @')[0]}"


def _resting(job: Job, rank: int) -> list[str]:
    offload = job.plan.offload
    return [
        role
        for role, home in job.homes.items()
        if (rank in home.ranks and role not in offload)
        or any(rank in copy.ranks for copy in job.kept.get(role, ()))
    ]


def _fold(rows: Sequence[Sequence[str]]) -> Iterator[tuple[int, int]]:
    widths = [2 + max(map(len, column)) for column in zip(*rows, strict=True)]
    first, used = 0, 0
    for number, width in enumerate(widths):
        if used + width > _WIDTH - 12 and number > first:
            yield first, number
            first = number
            used = 0
        used += width
    yield first, len(widths)


def format_reallocations(programs: Sequence[Program], memory: Memory, cluster: Cluster) -> str:
    """Format a line per reallocation: its layouts, and the bytes sent between devices."""
    rows = [["reallocation", "when", "bytes in all", "busiest device", "between nodes"]]
    for move in dict.fromkeys(i for p in programs for i in p.instructions if isinstance(i, Reallocate)):
        name = name_parameters(move.role, move.parameter_set)
        name += "" if move.into in (None, move.role) else f" mixed into {move.into}"
        row = [f"{name}: {move.source.layout} -> {move.target.layout}", _when(programs, move)]
        rows.append([*row, *map(format_bytes, _count_bytes(move, memory, cluster))])
    return "\n".join(align_columns(rows) if len(rows) > 1 else ["nothing is reallocated"]) + "\n"


def _count_bytes(move: Reallocate, memory: Memory, cluster: Cluster) -> tuple[int, ...]:
    """Count the bytes of a reallocation: in total, on the busiest device, and between nodes.

    The result is empty if the shape of a model is not known.
    """
    into = move.into or move.role
    if move.role not in memory.stored or into not in memory.stored:
        return ()
    ends = ((memory.stored[move.role], move.source), (memory.stored[into], move.target))
    width = min(
        of.element_bytes if (own := place.strategy.dtype) is None else ELEMENT_BYTES[own]
        for of, place in ends
    )
    source, target = (
        build_layout(of.shape, of.head, place, of.sets[move.parameter_set].tensors) for of, place in ends
    )
    width = element_width(move.parameter_set, width)
    routes = reallocate(source, target, cluster)
    links = routes.bytes_by_link(width)
    busiest = max(max(b.sent, b.received) for b in routes.bytes_by_rank(width).values())
    return links.node + links.network, busiest, links.network


def _when(programs: Sequence[Program], move: Reallocate) -> str:
    """Describe when a reallocation happens: before the call that needs it, or after the call that precedes it."""
    there = programs[move.target.ranks[0]].instructions
    later = [i for i in there[there.index(move) :] if isinstance(i, Run)]
    users = [run.call for run in later if (run.role, run.placement.layout) == (move.role, move.target.layout)]
    if users and move.into is None:
        return f"before {users[0]}"
    here = programs[move.source.ranks[0]].instructions
    earlier = [i.call for i in here[: here.index(move)] if isinstance(i, Run) and i.role == move.role]
    return f"after {earlier[-1]}" if earlier else "once, at the start"


_TEMPORARY = (
    PartKind.ACTIVATIONS,
    PartKind.LOGITS,
    PartKind.CACHE,
    PartKind.PACKED_WEIGHTS,
    PartKind.GRAPHS,
)


def format_memory(devices: Sequence[DeviceMemory], *, limited: bool) -> str:
    """Format a table of each device's memory between steps and at its peak, with the largest parts of the peak.

    `devices` are in the order of their ranks. `limited`: whether the capacity of the devices is known.
    """
    rows = []
    for device in devices:
        resident = [(part, size) for part, size in device.resident.items() if part.role is not None]
        state = sum(size for part, size in device.resident.items() if _is_state(part))
        parameters = sum(size for _, size in resident) - state
        rows.append((*map(format_bytes, (parameters, state)), *_most(device.peak)))
    head = ["devices", "parameters", "gradients and optimizer", "most in a step", "of it"]
    table = align_columns([head, *([ranks, *cells] for ranks, cells in group_alike(rows))])
    capacity = [f"a plan may use {format_bytes(devices[0].capacity)} of a device"] if limited else []
    return "\n".join([*table, *capacity]) + "\n"


def _most(peak: Footprint) -> tuple[str, str]:
    temporary = {part: size for part, size in peak.parts.items() if part.kind in _TEMPORARY}
    named = sorted(temporary, key=lambda part: -temporary[part])[:2]
    parts = ", ".join(f"{part} {format_bytes(temporary[part])}" for part in named)
    return f"{format_bytes(peak.bytes)} ({peak.during})", parts


def _is_state(part: MemoryPart) -> bool:
    """Return whether a part holds gradients and optimizer state in device memory, not on the host."""
    return part.kind is PartKind.OPTIMIZER and not part.host


def group_alike(rows: Sequence[Value]) -> Iterator[tuple[str, Value]]:
    """Group ranks that have equal rows. Yields the ranks as text, and their row. `rows` has one row per rank."""
    ranks: dict[Value, list[int]] = {}
    for rank, row in enumerate(rows):
        ranks.setdefault(row, []).append(rank)
    for row, found in ranks.items():
        text = format_ranks(found)
        runs = text.split(",")
        yield (text if len(runs) < 5 else f"{','.join(runs[:3])},… ({len(found)} devices)"), row


def describe_unknown_sizes(job: Job) -> str:
    """Write a note about roles whose models are not on this machine; empty if there are none."""
    if not job.unknown:
        return ""
    return f"the model of {', '.join(job.unknown)} is not on this machine, so its bytes are not counted\n"
