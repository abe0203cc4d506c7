"""Functions in programs: started early, waited for late, and in time between the two."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from realrl.algorithms.policy import make_eval_graph
from realrl.algorithms.ppo import train_graph
from realrl.dataflow.graph import DataflowGraph
from realrl.plan.cluster import Cluster
from realrl.plan.placement import Mesh, Placement, Strategy, function_placement
from realrl.plan.plan import Plan
from realrl.plan.presets import make_plan
from realrl.planner.simulate.estimator import Slice
from realrl.planner.simulate.simulator import simulate
from realrl.program.instructions import Instruction, Program, Receive, Report, Run, Send
from realrl.program.lower import home_placements, lower
from realrl.program.text import format_program, parse_instruction, parse_program
from realrl.program.validate import ProgramError, validate
from tests.rewards import function_reward

GRAPH = train_graph(minibatches=2, reward=function_reward("reward.py:score"))
NAME = "reward.function"


def compiled(plan: Plan, graph: DataflowGraph = GRAPH) -> list[Program]:
    programs = lower(graph, plan, home_placements(graph, plan))
    validate(programs, graph, home_placements(graph, plan))
    return programs


def on_two(**meshes: str) -> Plan:
    """A plan on two devices, of calls elsewhere than on both."""
    placements = {}
    for call in GRAPH.calls:
        mesh = Mesh.parse(meshes.get(call.name.replace(".", "_"), "0-1"))
        placements[call.name] = (
            function_placement(mesh) if call.is_function else Placement(mesh, Strategy(dp=mesh.size))
        )
    return Plan(Cluster(1, 2), placements)


def position(program: Program, kind: type[Instruction], call: str) -> int:
    """Where a call is run, first sent from, or first received for."""
    names = {Run: "call", Send: "producer", Receive: "consumer"}
    return next(
        i
        for i, instruction in enumerate(program.instructions)
        if isinstance(instruction, kind) and getattr(instruction, names[kind]) == call
    )


@pytest.mark.parametrize("name", ["symmetric", "disjoint", "interleave", "separate", "heuristic"])
def test_programs_with_a_function_are_valid_and_survive_their_text(name: str) -> None:
    plan = make_plan(name, GRAPH, Cluster(1, 4), 1024)
    for program in compiled(plan):
        assert parse_program(format_program(program)) == program
        runs = [i for i in program.instructions if isinstance(i, Run) and i.call == NAME]
        assert all(run.role is None for run in runs)
        assert bool(runs) == (program.rank in plan[NAME].ranks)


def test_a_function_is_started_before_inference_and_sent_after_it() -> None:
    for program in compiled(on_two()):
        start, send = position(program, Run, NAME), position(program, Send, NAME)
        for name in ("ref.inference", "critic.inference"):
            assert start < position(program, Run, name) < send
        assert send < position(program, Receive, "actor.train")


def test_every_rank_of_a_function_reports_what_it_has() -> None:
    programs = compiled(on_two())
    report = next(i for i in programs[1].instructions if isinstance(i, Report) and i.call == NAME)
    assert (report.senders, report.receiver) == ((1,), 0)
    assert report in programs[0].instructions


def test_a_program_that_trains_without_the_score_is_refused() -> None:
    plan = on_two()
    programs = [
        Program(p.rank, tuple(i for i in p.instructions if not (isinstance(i, Run) and i.call == NAME)))
        for p in compiled(plan)
    ]
    with pytest.raises(ProgramError, match="sends score, which it does not hold"):
        validate(programs, GRAPH, home_placements(GRAPH, plan))


def intervals(plan: Plan, seconds: Mapping[str, float], rank: int) -> dict[str, Slice]:
    """Calls of a step on a rank."""

    def duration(instruction: Instruction) -> float:
        return seconds.get(instruction.call, 1.0) if isinstance(instruction, Run) else 0.0

    simulation = simulate(compiled(plan), duration)
    return {s.instruction.call: s for s in simulation.slices(0)[rank] if isinstance(s.instruction, Run)}


def test_a_function_overlaps_inference_of_its_own_rank() -> None:
    calls = intervals(on_two(), {NAME: 5.0}, rank=0)
    function, ref, train = calls[NAME], calls["ref.inference"], calls["actor.train"]
    assert function.host and not ref.host
    assert function.start == ref.start == calls["actor.generate"].seconds
    # Both inferences take a second each; training waits for the rest of the function.
    assert train.start + train.waiting == function.start + function.seconds


def test_a_function_overlaps_inference_of_another_rank() -> None:
    plan = on_two(reward_function="1", ref_inference="0")
    function = intervals(plan, {NAME: 5.0}, rank=1)[NAME]
    here = intervals(plan, {NAME: 5.0}, rank=0)
    assert NAME not in here
    assert here["ref.inference"].start == function.start
    assert here["actor.train"].start + here["actor.train"].waiting == function.start + function.seconds


def test_a_short_function_costs_a_step_nothing() -> None:
    with_function = intervals(on_two(), {NAME: 2.0}, rank=0)["critic.train"]
    without = intervals(on_two(), {NAME: 0.0}, rank=0)["critic.train"]
    assert with_function.start == without.start


def test_a_function_nobody_reads_is_waited_for_at_the_end_of_the_step() -> None:
    graph = make_eval_graph(reward=function_reward("reward.py:score"))
    placements = {
        call.name: function_placement(Mesh(0, 1)) if call.is_function else Placement(Mesh(0, 1), Strategy())
        for call in graph.calls
    }
    programs = compiled(Plan(Cluster(1, 1), placements), graph)
    found = simulate(
        programs, lambda i: 7.0 if isinstance(i, Run) and i.call == NAME else 1.0 * isinstance(i, Run)
    )
    assert found.step_seconds == 1.0 + 7.0


def test_a_function_is_written_with_mesh_and_degree_alone() -> None:
    plan = on_two(reward_function="1")
    placements = {**plan.placements, NAME: Placement(Mesh(1, 1), Strategy(micro_batch_tokens=64))}
    (program,) = [p for p in compiled(replace(plan, placements=placements)) if p.rank == 1]
    assert "run        reward.function on d1 @1\n" in format_program(program)
    assert parse_program(format_program(program)) == program


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        ("d1 t1 p1 @0 mb=64", "'d1 t1 p1 @0 mb=64' is not understood; write for example d2 @0-1"),
        ("d2 @0", "mesh 0 has 1 devices, not 2"),
    ],
)
def test_another_form_of_a_functions_placement_is_refused(placement: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_instruction(f"run reward.function on {placement}")
