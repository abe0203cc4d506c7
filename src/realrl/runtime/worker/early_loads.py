"""Loads that a rank with a GPU begins during the call before them."""

from collections.abc import Mapping

from realrl.planner.simulate.estimate import DeviceMemory
from realrl.planner.simulate.footprints import compute_footprints
from realrl.program.instructions import Load, Program
from realrl.program.memory import find_early_loads
from realrl.recipe.experiment import Experiment
from realrl.runtime.prepare.compile import Compiled
from realrl.runtime.prepare.devices import memory_spec
from realrl.runtime.prepare.scenarios import phase_scenarios
from realrl.runtime.processes.process import Process
from realrl.runtime.worker.kept_decoding import count_beside

EarlyLoads = Mapping[int, tuple[Load, ...]]
"""Position of a call in a program -> loads that begin with it."""


def list_early_loads(
    experiment: Experiment, compiled: Compiled, process: Process, kept: Mapping[str, int] | None = None
) -> list[tuple[Program, EarlyLoads]]:
    """List the loads that may begin early, for every program of this rank that has any.

    Device memory stays below the peak that the plan has anyway, beside what generate calls have `kept` (see
    `list_kept_decoding`). None on a CPU, where copying and computing share
    the cores.
    """
    if process.gpu is None:
        return []
    spec = memory_spec(experiment, compiled.train.plan.cluster, process.gpu)
    scenarios, memory, rank = phase_scenarios(experiment, compiled, spec), compiled.memory, process.rank
    resting = sum(memory.at_rest(rank).values())
    devices: list[tuple[Program, DeviceMemory, dict[str, int]]] = []
    for name, phase in compiled.phases.items():
        for programs in (phase.programs, *phase.partial.values()):
            (device,) = compute_footprints(scenarios[name], memory, [programs[rank]])
            needed = {
                footprint.during: footprint.bytes
                + count_beside(kept or {}, footprint.during if name == "train" else "")
                for footprint in device.footprints
            }
            devices.append((programs[rank], device, needed))
    peak = max(min(max(needed.values()), device.capacity) for _, device, needed in devices)
    found: list[tuple[Program, EarlyLoads]] = []
    for program, device, needed in devices:
        communicators = sum(device.resident.values()) - resting
        early = find_early_loads(
            program,
            memory,
            {call: size - communicators for call, size in needed.items()},
            peak - communicators,
        )
        if early:
            found.append((program, early))
    return found
