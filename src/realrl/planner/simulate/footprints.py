"""What each device holds while a program's calls run, by what it is."""

from collections.abc import Mapping, Sequence

from realrl.plan.placement import Placement
from realrl.planner.simulate.estimate import DeviceMemory, Footprint
from realrl.planner.simulate.scenario import Scenario
from realrl.program.instructions import Load, Program, Reallocate, Run
from realrl.program.memory import Holdings, Item, Memory, Stored


def compute_footprints(
    scenario: Scenario, held: Memory, programs: Sequence[Program]
) -> tuple[DeviceMemory, ...]:
    """The memory of every rank through a step of its program.

    `held` knows what lies where between steps, roles that the graph of `scenario` does not use among them. Models
    that are not in `scenario.models` count nothing. UserError where a call has fewer records than
    data-parallel ranks.
    """
    devices = _Devices(scenario, held)
    return tuple(devices.device(program) for program in programs)


class _Devices:
    def __init__(self, scenario: Scenario, held: Memory) -> None:
        self._scenario, self._held = scenario, held
        self._known: dict[object, tuple[Mapping[str, int], tuple[Footprint, ...]]] = {}

    def device(self, program: Program) -> DeviceMemory:
        """Ranks with the same program and the same place in everything hold the same."""
        runs = (i.placement for i in program.instructions if isinstance(i, Run) and i.role is not None)
        positions = {place: _position(place, program.rank) for place in (*self._held.resting, *runs)}
        alike = (tuple(map(id, program.instructions)), *positions.values())
        if alike not in self._known:
            resting = self._parts(self._held.at_rest(program.rank))
            self._known[alike] = resting, self._footprints(program)
        return DeviceMemory(program.rank, self._scenario.memory.capacity(program.rank), *self._known[alike])

    def _footprints(self, program: Program) -> tuple[Footprint, ...]:
        """One for each call of a model: while it runs, or while parameters are moved before it, if that takes more.
        What is moved after the last one counts to it. Functions hold nothing."""
        found: list[Footprint] = []
        moving: list[dict[str, int]] = []
        for instruction, holdings in self._held.timeline(program):
            if isinstance(instruction, Run) and instruction.role is not None:
                model = self._scenario.models.get(instruction.role)
                dynamic = {} if model is None else self._dynamic(instruction, model, program.rank)
                running = self._parts(holdings) | dynamic
                moments = [running, *moving]
                largest = max(moments, key=lambda parts: sum(parts.values()))
                found.append(Footprint(instruction.call, largest))
                moving = []
            elif isinstance(instruction, Reallocate | Load):
                moving.append(self._parts(holdings))
        if found:
            *before, last = found
            found = [
                *before,
                max([last, *(Footprint(last.during, m) for m in moving)], key=lambda f: f.bytes),
            ]
        return tuple(found)

    def _parts(self, holdings: Holdings) -> dict[str, int]:
        return {self._name(item): size for item, size in holdings.items() if size}

    def _name(self, item: Item) -> str:
        if item.host:
            return f"{item.role} {'optimizer' if item.what == 'optimizer' else 'parameters'} (host copy)"
        if item.what == "optimizer":
            return f"{item.role} gradients and optimizer"
        copy = f" (copy {item.layout})" if item.layout != self._held.home(item.role) else ""
        return f"{item.role} parameters{copy}"

    def _dynamic(self, run: Run, model: Stored, rank: int) -> dict[str, int]:
        """What the call needs besides on the rank, by term."""
        scenario = self._scenario
        call = scenario.graph.call(run.call)
        stages = scenario.memory.stages(call, model, run.placement, scenario.workload)
        return {name: size for name, size in stages[run.placement.pp_index(rank)].dynamic.items() if size}


def _position(place: Placement, rank: int) -> tuple[int, int] | None:
    """Which part of a model a rank has."""
    inside = place.mesh.first <= rank < place.mesh.first + place.mesh.size
    return (place.pp_index(rank), place.tp_index(rank)) if inside else None
