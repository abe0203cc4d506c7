"""The estimate of a plan: its programs, simulated with the cost model, and what devices hold meanwhile."""

from collections.abc import Mapping, Sequence

from realrl.plan.plan import Plan
from realrl.planner.simulate.durations import Durations
from realrl.planner.simulate.estimate import CallEstimate, Estimate, MoveEstimate, Slice
from realrl.planner.simulate.footprints import compute_footprints
from realrl.planner.simulate.scenario import Scenario
from realrl.planner.simulate.simulator import Simulation, simulate
from realrl.planner.workload.flops import count_flops
from realrl.program.instructions import Program, Reallocate, Run
from realrl.program.lower import home_placements, kept_copies, lower, offloaded
from realrl.program.memory import Memory


def estimate_plan(scenario: Scenario, plan: Plan) -> Estimate:
    """What a step takes under a plan that `Plan.check` accepts.

    UserError where a call has fewer records than data-parallel ranks, or a mesh lies on unlike nodes.
    """
    graph = scenario.graph
    homes = home_placements(graph, plan)
    kept = kept_copies(graph, plan, homes)
    programs = lower(graph, plan, homes, kept)
    durations = Durations(scenario, plan)
    simulation = simulate(programs, durations)
    memory = Memory(scenario.models, homes, offloaded(plan), kept)
    return Estimate(
        plan,
        simulation.step_seconds,
        simulation.repeated_seconds,
        scenario.workload.tokens(graph),
        _calls(scenario, plan, durations, simulation),
        tuple(_moves(scenario, programs, simulation)),
        simulation.slices(0),
        compute_footprints(scenario, memory, programs),
    )


def _calls(
    scenario: Scenario, plan: Plan, durations: Durations, simulation: Simulation
) -> Mapping[str, CallEstimate]:
    found = []
    for event in _once(simulation):
        if isinstance(event.instruction, Run):
            call = scenario.graph.call(event.instruction.call)
            model, place = scenario.model(call), plan[call.name]
            flops, peak = count_flops(call, model, scenario.workload), 0.0
            if model is not None:
                width = model.width(place.strategy)
                peak = sum(group.size * group.device.flops(width) for group in scenario.spec.groups)
            start, end = event.start + event.waiting, event.start + event.seconds
            found.append(CallEstimate(call, place, durations.terms(call.name), start, end, flops, peak))
    found.sort(key=lambda call: call.start)
    # Of a function the last rank counts.
    return {of.call.name: of for of in found}


def _moves(scenario: Scenario, programs: Sequence[Program], simulation: Simulation) -> list[MoveEstimate]:
    found = []
    for event in _once(simulation):
        move = event.instruction
        if isinstance(move, Reallocate):
            sent, network = scenario.cost.moved(scenario.models[move.role], move.source, move.target)
            start, seconds = event.start + event.waiting, event.seconds - event.waiting
            before = _before(programs[move.target.mesh.first], move)
            found.append(MoveEstimate(move, before, start, seconds, sent, network))
    return sorted(found, key=lambda move: move.start)


def _before(program: Program, move: Reallocate) -> str | None:
    """The call that the copy is made for."""
    following = program.instructions[program.instructions.index(move) + 1 :]
    for instruction in following if move.into is None else ():
        if isinstance(instruction, Run) and instruction.role == move.role:
            return instruction.call if instruction.placement.layout == move.target.layout else None
    return None


def _once(simulation: Simulation) -> list[Slice]:
    """Calls and reallocations of the first step, each as one of its ranks sees it; a function, which ranks call
    at times of their own, as often as these differ."""
    found = {
        (event.instruction, event.start + event.seconds): event
        for events in simulation.events.values()
        for event in events
        if event.step == 0 and isinstance(event.instruction, Run | Reallocate)
    }
    return list(found.values())
