"""Use the GPU memory that a plan leaves free to begin loads early and to keep decode memory between steps.

Neither helps on CPUs, because copies and computation share the cores and there are no CUDA graphs. Does not import
torch.
"""

from collections.abc import Iterator, Mapping

from realrl.dataflow.call import Kind
from realrl.planner.simulate.estimate import DeviceMemory
from realrl.planner.simulate.plan_memory import compute_footprints
from realrl.program.instructions import Program, Run
from realrl.program.memory import EarlyLoads, find_early_loads
from realrl.runtime.prepare.devices import memory_spec
from realrl.runtime.prepare.gpu import Gpu
from realrl.runtime.prepare.job import Job
from realrl.runtime.prepare.scenarios import phase_scenarios

_KEPT_PARTS = ("cache", "graphs")
"""Parts of a generate call's memory that may be kept until the next step."""


def list_early_loads(
    job: Job,
    rank: int,
    gpu: Gpu | None,
    kept: Mapping[str, int] | None = None,
) -> list[tuple[Program, EarlyLoads]]:
    """List the loads that may begin early, during the preceding call, for each program of the rank that has any.

    Early loads never raise the peak of device memory. `kept` is the result of `list_kept_decoding`.
    """
    if gpu is None:
        return []
    spec = memory_spec(job.experiment, job.plan.cluster, gpu)
    scenarios, memory = phase_scenarios(job, spec), job.memory
    resting = sum(memory.at_rest(rank).values())
    devices: list[tuple[Program, DeviceMemory, dict[str, int]]] = []
    for name, phase in job.phases.items():
        for programs in (phase.programs, *phase.partial.values()):
            (device,) = compute_footprints(scenarios[name], memory, [programs[rank]])
            needed = {
                footprint.during: footprint.bytes
                + _count_beside(kept or {}, footprint.during if name == "train" else "")
                for footprint in device.footprints
            }
            devices.append((programs[rank], device, needed))
    peak = max(min(max(needed.values(), default=0), device.capacity) for _, device, needed in devices)
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


def list_kept_decoding(job: Job, rank: int, gpu: Gpu | None) -> dict[str, int]:
    """List the generate calls of a training step that keep their KV cache and CUDA graphs, with their planned
    bytes.

    A call qualifies if its parameters never leave the device, and if everything else still fits, including
    evaluations. Calls with tensor or expert parallelism do not qualify: their CUDA graphs contain collectives and
    must be freed before the communicators.
    """
    if gpu is None:
        return {}
    spec = memory_spec(job.experiment, job.plan.cluster, gpu)
    scenarios, memory = phase_scenarios(job, spec), job.memory
    beside: list[tuple[str, str, int]] = []
    capacity = 0
    for name, phase in job.phases.items():
        for programs in (phase.programs, *phase.partial.values()):
            (device,) = compute_footprints(scenarios[name], memory, [programs[rank]])
            capacity = device.capacity
            beside += [(name, footprint.during, footprint.bytes) for footprint in device.footprints]
    kept: dict[str, int] = {}
    scenario = scenarios["train"]
    for run in _list_candidates(job.train.programs[rank], job, rank):
        assert run.role is not None
        stages = scenario.memory.stages(
            scenario.graph.call(run.call), memory.stored[run.role], run.placement, scenario.workload
        )
        parts = stages[run.placement.stage(rank)].dynamic
        found = kept | {run.call: sum(parts.get(part, 0) for part in _KEPT_PARTS)}
        # An evaluation keeps no memory of its own, so its calls run beside all memory that training keeps.
        if parts.get("graphs") and all(
            size + _count_beside(found, during if name == "train" else "") <= capacity
            for name, during, size in beside
        ):
            kept = found
    return kept


def _count_beside(kept: Mapping[str, int], call: str) -> int:
    """Count the bytes of decode memory that generate calls other than `call` keep while `call` runs."""
    return sum(size for name, size in kept.items() if name != call)


def _list_candidates(program: Program, job: Job, rank: int) -> Iterator[Run]:
    """List the generate calls of a program whose parameters never leave the device."""
    graph, memory = job.train.graph, job.memory
    resting = {(state.role, state.layout) for state in memory.at_rest(rank) if state.state == "parameters"}
    for run in program.instructions:
        if not isinstance(run, Run) or run.role not in memory.stored:
            continue
        generates, strategy = graph.call(run.call).kind is Kind.GENERATE, run.placement.strategy
        alone = strategy.cp == strategy.tp == strategy.ep == 1
        if generates and alone and (run.role, run.placement.layout) in resting:
            yield run
