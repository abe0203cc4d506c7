"""Predicted Chrome trace of a plan."""

from collections.abc import Mapping, Sequence

from realrl.plan.plan import Plan
from realrl.planner.simulate.durations import Durations
from realrl.planner.simulate.estimate import Estimate, Slice
from realrl.planner.simulate.scenario import Scenario
from realrl.planner.simulate.simulator import STEPS, simulate
from realrl.program.instructions import Run
from realrl.program.lower import home_placements, kept_copies, lower_start
from realrl.program.portions import lower_step
from realrl.program.text import format_instruction
from realrl.program.trace_file import Event, PredictedMemory, PredictedStep, make_event


def predict_trace(scenario: Scenario, plan: Plan, steps: int = STEPS) -> list[list[Event]]:
    """Predict the trace events of start-up and the first steps, by rank (`program.trace_file.write_trace`)."""
    homes = home_placements(scenario.graph, plan)
    kept = kept_copies(scenario.graph, plan, homes)
    durations = Durations(scenario, plan)
    start = simulate(lower_start(plan, homes, kept, scenario.parts), durations, steps=1)
    walk = simulate(lower_step(scenario.graph, plan, homes, kept, scenario.parts), durations, steps)
    trace = _events(start.slices(0), durations, 0.0)
    for step in range(steps):
        for rank, events in enumerate(_events(walk.slices(step), durations, start.step_seconds)):
            trace[rank] += events
    return trace


def predict_step(estimate: Estimate) -> PredictedStep:
    """Predict the trace events and the memory of one step."""
    memory = [
        PredictedMemory(
            rank=device.rank,
            capacity_bytes=device.capacity,
            resting_bytes=sum(device.resident.values()),
            peak_bytes=device.peak.bytes,
            during=device.peak.during,
        )
        for device in estimate.memory
    ]
    ranks = [[_event(slice_, 0.0, {}) for slice_ in rank] for rank in estimate.slices]
    return PredictedStep(seconds=estimate.repeated_seconds, ranks=ranks, memory=tuple(memory))


def _events(slices: Sequence[Sequence[Slice]], durations: Durations, after: float) -> list[list[Event]]:
    return [[_event(slice_, after, _terms(slice_, durations)) for slice_ in rank] for rank in slices]


def _event(slice_: Slice, after: float, terms: Mapping[str, float]) -> Event:
    return make_event(
        slice_.rank,
        format_instruction(slice_.instruction),
        1e6 * (after + slice_.start),
        1e6 * slice_.seconds,
        {"step": slice_.step, "waiting": slice_.waiting, **terms},
        host=slice_.host,
    )


def _terms(slice_: Slice, durations: Durations) -> Mapping[str, float]:
    run = slice_.instruction
    return durations.terms(run.call, run.portion) if isinstance(run, Run) else {}
