"""Predict the peak memory of each device during a step of a plan, by call and part."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from realrl.plan.axes import Divided, axes_dividing
from realrl.plan.placement import Placement
from realrl.planner.simulate.estimate import DeviceMemory, Footprint, MemoryPart, NodeMemory, PartKind
from realrl.planner.simulate.scenario import Scenario
from realrl.program.instructions import Load, Program, Reallocate, Run
from realrl.program.memory import HeldState, Holdings, Memory, StoredModel


def compute_footprints(
    scenario: Scenario, held: Memory, programs: Sequence[Program]
) -> tuple[DeviceMemory, ...]:
    """Compute the memory of every rank through a step of its program.

    `held` describes where state resides between steps. It may include roles that the graph of `scenario` does not
    use. Models missing from `scenario.models` count no bytes. Raises UserError if a call has fewer records than DP
    ranks.
    """
    devices = _Devices(scenario, held)
    return tuple(devices.device(program) for program in programs)


def compute_host_memory(scenario: Scenario, held: Memory) -> tuple[NodeMemory, ...]:
    """Compute the memory that offloaded state takes on the host of every node that has a limit."""
    cluster, found = scenario.spec.cluster, []
    for node in range(cluster.nodes):
        capacity = scenario.memory.host_capacity(node)
        if capacity < math.inf:
            number = sum(sum(held.in_host(rank).values()) for rank in cluster.ranks(node))
            found.append(NodeMemory(node=node, capacity=int(capacity), bytes=number))
    return tuple(found)


class _Devices:
    def __init__(self, scenario: Scenario, held: Memory) -> None:
        self._scenario = scenario
        self._held = held
        self._known: dict[object, tuple[Mapping[MemoryPart, int], tuple[Footprint, ...]]] = {}

    def device(self, program: Program) -> DeviceMemory:
        """Return the memory of a rank. Ranks with equal programs and positions share the result."""
        runs = (i.placement for i in program.instructions if isinstance(i, Run) and i.role is not None)
        positions = {place: _position(place, program.rank) for place in (*self._held.resting, *runs)}
        alike = (tuple(map(id, program.instructions)), *positions.values())
        if alike not in self._known:
            shared = self._communicators(program)
            resting = self._parts(self._held.at_rest(program.rank)) | shared
            footprints = [Footprint(f.during, {**f.parts, **shared}) for f in self._footprints(program)]
            self._known[alike] = resting, tuple(footprints)
        return DeviceMemory(program.rank, self._scenario.memory.capacity(program.rank), *self._known[alike])

    def _communicators(self, program: Program) -> dict[MemoryPart, int]:
        """Return the bytes of a rank's NCCL communicators, which exist through the whole step."""
        places = [i.placement for i in program.instructions if isinstance(i, Run) and i.role is not None]
        size = self._scenario.memory.communicators(places)
        return {MemoryPart(PartKind.COMMUNICATORS): size} if size else {}

    def _footprints(self, program: Program) -> tuple[Footprint, ...]:
        """Return the footprint of each model call, which is its peak while it runs or while parameters are moved
        before it.

        Reallocations after the last call are attributed to it. Functions hold no device memory.
        """
        footprints: list[Footprint] = []
        moving: list[dict[MemoryPart, int]] = []
        for instruction, holdings in self._held.timeline(program):
            if isinstance(instruction, Run) and instruction.role is not None:
                model = self._scenario.models.get(instruction.role)
                dynamic = {} if model is None else self._dynamic(instruction, model, program.rank)
                running = self._parts(holdings) | dynamic
                moments = [running, *moving]
                largest = max(moments, key=lambda parts: sum(parts.values()))
                footprints.append(Footprint(instruction.call, largest))
                moving = []
            elif isinstance(instruction, Reallocate | Load):
                moving.append(self._parts(holdings))
        if footprints:
            *before, last = footprints
            footprints = [
                *before,
                max([last, *(Footprint(last.during, m) for m in moving)], key=lambda f: f.bytes),
            ]
        largest_of: dict[str, Footprint] = {}
        for footprint in footprints:  # a call may run once for each portion
            known = largest_of.setdefault(footprint.during, footprint)
            if footprint.bytes > known.bytes:
                largest_of[footprint.during] = footprint
        return tuple(largest_of.values())

    def _parts(self, holdings: Holdings) -> dict[MemoryPart, int]:
        """Sum bytes by part. All parameter sets of a role in one layout are one part."""
        found: Counter[MemoryPart] = Counter()
        for item, size in holdings.items():
            found[self._part(item)] += size
        return {part: size for part, size in found.items() if size}

    def _part(self, item: HeldState) -> MemoryPart:
        if item.state == "optimizer":
            return MemoryPart(PartKind.OPTIMIZER, item.role, host=item.host)
        # All host copies of a role are one part, even if their layouts differ.
        is_copy = not item.host and item.layout != self._held.home(item.role)
        return MemoryPart(PartKind.PARAMETERS, item.role, item.layout if is_copy else None, item.host)

    def _dynamic(self, run: Run, model: StoredModel, rank: int) -> dict[MemoryPart, int]:
        """Return the working memory of the call on the rank, by part."""
        scenario = self._scenario
        call = scenario.graph.call(run.call)
        stages = scenario.memory.stages(call, model, run.placement, scenario.workload)
        needed = stages[run.placement.stage(rank)].dynamic
        return {MemoryPart(PartKind(name)): size for name, size in needed.items() if size}


def _position(place: Placement, rank: int) -> tuple[int, ...] | None:
    """Return a rank's coordinates on the axes along which memory sizes differ. Returns None outside the mesh."""
    inside = place.mesh.first <= rank < place.mesh.first + place.mesh.size
    return place.coordinates(rank, axes_dividing(Divided.LAYERS, Divided.MATRICES)) if inside else None
