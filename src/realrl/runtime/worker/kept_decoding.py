"""Generate calls of a rank with a GPU that leave their cache and their graphs to the next step."""

from collections.abc import Iterator, Mapping

from realrl.dataflow.call import Kind
from realrl.planner.simulate.footprints import compute_footprints
from realrl.program.instructions import Program, Run
from realrl.program.memory import Memory
from realrl.recipe.experiment import Experiment
from realrl.runtime.prepare.compile import Compiled
from realrl.runtime.prepare.devices import memory_spec
from realrl.runtime.prepare.scenarios import phase_scenarios
from realrl.runtime.processes.process import Process

_PARTS = ("cache", "graphs")
"""What stays, of the parts of a call's memory."""


def list_kept_decoding(experiment: Experiment, compiled: Compiled, process: Process) -> dict[str, int]:
    """List the generate calls of training steps that keep their memory on this rank, with its bytes as planned.

    Those whose parameters stay where they are, as far as everything else in steps of every kind fits beside. None
    with tensor parallelism, whose graphs have collectives in them, and must be gone before their communicators are;
    none on a CPU, which has no graphs.
    """
    if process.gpu is None:
        return {}
    spec = memory_spec(experiment, compiled.train.plan.cluster, process.gpu)
    scenarios, memory, rank = phase_scenarios(experiment, compiled, spec), compiled.memory, process.rank
    beside: list[tuple[str, str, int]] = []
    capacity = 0
    for name, phase in compiled.phases.items():
        for programs in (phase.programs, *phase.partial.values()):
            (device,) = compute_footprints(scenarios[name], memory, [programs[rank]])
            capacity = device.capacity
            beside += [(name, footprint.during, footprint.bytes) for footprint in device.footprints]
    kept: dict[str, int] = {}
    scenario = scenarios["train"]
    for run in _list_candidates(compiled.train.programs[rank], compiled, memory, rank):
        assert run.role is not None
        stages = scenario.memory.stages(
            scenario.graph.call(run.call), memory.stored[run.role], run.placement, scenario.workload
        )
        parts = stages[run.placement.stage(rank)].dynamic
        found = kept | {run.call: sum(parts.get(part, 0) for part in _PARTS)}
        # In an evaluation nothing is kept, so that its calls come on top of all that is.
        if parts.get("graphs") and all(
            size + count_beside(found, during if name == "train" else "") <= capacity
            for name, during, size in beside
        ):
            kept = found
    return kept


def count_beside(kept: Mapping[str, int], call: str) -> int:
    """Count the bytes that other calls have left while `call` runs."""
    return sum(size for name, size in kept.items() if name != call)


def _list_candidates(program: Program, compiled: Compiled, memory: Memory, rank: int) -> Iterator[Run]:
    """List the generate calls of a program whose parameters are never away."""
    graph = compiled.train.graph
    resting = {(state.role, state.layout) for state in memory.at_rest(rank) if state.state == "parameters"}
    for run in program.instructions:
        if not isinstance(run, Run) or run.role not in memory.stored:
            continue
        generates = graph.call(run.call).kind is Kind.GENERATE
        if generates and run.placement.strategy.tp == 1 and (run.role, run.placement.layout) in resting:
            yield run
