"""Prediction of a plan's step, by simulation of its programs with the cost and memory models."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from realrl.dataflow.graph import share_steps
from realrl.plan.plan import Plan
from realrl.planner.simulate.durations import Durations
from realrl.planner.simulate.estimate import CallEstimate, Estimate, MoveEstimate, Slice
from realrl.planner.simulate.plan_memory import compute_footprints, compute_host_memory
from realrl.planner.simulate.scenario import Scenario
from realrl.planner.simulate.simulator import Simulation, simulate
from realrl.planner.workload.flops import count_flops
from realrl.program.instructions import Program, Reallocate, Run
from realrl.program.lower import home_placements, kept_copies, offloaded
from realrl.program.memory import Memory
from realrl.program.portions import lower_step


def estimate_plan(scenario: Scenario, plan: Plan) -> Estimate:
    """Predict a step in which all moving averages are due, under a plan that `Plan.check` accepts.

    Raises UserError if a call has fewer records than DP ranks, or if a mesh has several kinds of devices.
    """
    graph = scenario.graph
    homes = home_placements(graph, plan)
    kept = kept_copies(graph, plan, homes)
    steps = list_steps(scenario, plan)
    programs = steps[0].programs
    durations = Durations(scenario, plan)
    simulations = [simulate(kind.programs, durations, reporting=durations.reporting) for kind in steps]
    simulation = simulations[0]
    repeated = sum(kind.share * of.repeated_seconds for kind, of in zip(steps, simulations, strict=True))
    memory = Memory(scenario.models, homes, offloaded(plan), kept)
    return Estimate(
        plan=plan,
        step_seconds=simulation.step_seconds,
        repeated_seconds=repeated,
        tokens=scenario.workload.tokens(graph),
        calls=_calls(scenario, plan, durations, simulation),
        moves=tuple(_moves(scenario, programs, simulation)),
        slices=simulation.slices(0),
        memory=compute_footprints(scenario, memory, programs),
        hosts=compute_host_memory(scenario, memory),
    )


@dataclass(frozen=True)
class StepKind:
    """Steps that update the same moving averages, with their programs."""

    programs: list[Program]
    share: float
    """Fraction of steps that are of this kind."""


def list_steps(scenario: Scenario, plan: Plan) -> list[StepKind]:
    """List the kinds of steps under a plan. The first kind updates all moving averages."""
    graph = scenario.graph
    homes = home_placements(graph, plan)
    kept = kept_copies(graph, plan, homes)
    shares = {graph.periods: 0.0, **share_steps(graph.periods)}
    return [
        StepKind(lower_step(graph.with_due(due), plan, homes, kept, scenario.parts), share)
        for due, share in shares.items()
    ]


def _calls(
    scenario: Scenario, plan: Plan, durations: Durations, simulation: Simulation
) -> Mapping[str, CallEstimate]:
    calls = []
    for event in _once(simulation):
        if isinstance(event.instruction, Run):
            call = scenario.graph.call(event.instruction.call)
            model = scenario.model(call)
            place = plan[call.name]
            peak = 0.0
            if model is not None:
                dtype = model.dtype_under(place.strategy)
                peak = sum(group.size * group.device.flops(dtype) for group in scenario.spec.groups)
            calls.append(
                CallEstimate(
                    call=call,
                    placement=place,
                    terms=durations.terms(call.name),
                    start=event.start + event.waiting,
                    end=event.start + event.seconds,
                    flops=count_flops(call, model, scenario.workload, place.strategy),
                    peak_flops=peak,
                )
            )
    # Each rank starts a function by itself. The dictionary keeps the start of the last rank.
    calls.sort(key=lambda estimate: estimate.start)
    found = {estimate.call.name: estimate for estimate in calls}
    if scenario.graph.streaming is not None:
        for estimate in calls:  # a call runs from its first portion to the end of its last one
            whole = found[estimate.call.name]
            start, end = min(whole.start, estimate.start), max(whole.end, estimate.end)
            found[estimate.call.name] = replace(whole, start=start, end=end)
    return found


def _moves(scenario: Scenario, programs: Sequence[Program], simulation: Simulation) -> list[MoveEstimate]:
    moves = []
    for event in _once(simulation):
        move = event.instruction
        if isinstance(move, Reallocate):
            model = scenario.models[move.role]
            sent, network = scenario.cost.moved(model, move.source, move.target, move.parameter_set)
            moves.append(
                MoveEstimate(
                    instruction=move,
                    before=_before(programs[move.target.mesh.first], move),
                    start=event.start + event.waiting,
                    seconds=event.seconds - event.waiting,
                    sent_bytes=sent,
                    network_bytes=network,
                )
            )
    return sorted(moves, key=lambda move: move.start)


def _before(program: Program, move: Reallocate) -> str | None:
    """Return the call for which a reallocation makes a temporary copy. Returns None for other reallocations."""
    following = program.instructions[program.instructions.index(move) + 1 :]
    for instruction in following if move.into is None else ():
        if isinstance(instruction, Run) and instruction.role == move.role:
            return instruction.call if instruction.placement.layout == move.target.layout else None
    return None


def _once(simulation: Simulation) -> list[Slice]:
    """Return the slices of the first step's calls and reallocations. One rank stands for all ranks that end
    together."""
    events = {
        (event.instruction, event.start + event.seconds): event
        for timeline in simulation.events.values()
        for event in timeline
        if event.step == 0 and isinstance(event.instruction, Run | Reallocate)
    }
    return list(events.values())
