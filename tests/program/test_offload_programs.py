"""Programs that offload and average: what lowering emits, and that the validator finds what is wrong."""

from dataclasses import replace

import pytest

from realrl.algorithms.ppo import train_graph
from realrl.dataflow.call import MovingAverage
from realrl.dataflow.graph import DataflowGraph
from realrl.plan.cluster import Cluster
from realrl.plan.placement import Mesh, Placement, Strategy
from realrl.plan.plan import Plan
from realrl.program.instructions import Load, Offload, Program, Reallocate, Release, Run
from realrl.program.lower import home_placements, lower, offloaded
from realrl.program.text import format_program, parse_program
from realrl.program.validate import ProgramError, validate

GRAPH = train_graph(minibatches=2, averages=[MovingAverage("ref", "actor", 0.125)])
ALL, HALF = Placement(Mesh(0, 4), Strategy(dp=2, tp=2)), Placement(Mesh(0, 2), Strategy(tp=2))
PLAN = Plan(
    Cluster(1, 4),
    {call.name: HALF if call.name in ("actor.generate", "ref.inference") else ALL for call in GRAPH.calls},
    offload=("actor", "ref", "reward"),
    offload_optimizer=("actor", "critic"),
)


@pytest.fixture
def programs() -> list[Program]:
    return lower(GRAPH, PLAN, home_placements(GRAPH, PLAN))


def check(programs: list[Program]) -> None:
    validate(programs, GRAPH, home_placements(GRAPH, PLAN), offloaded(PLAN))


def test_offloaded_state_is_loaded_for_its_calls_only(programs: list[Program]) -> None:
    check(programs)
    kinds = (Load, Offload, Run, Reallocate, Release)
    of_actor = [i for i in programs[3].instructions if isinstance(i, kinds) and i.role == "actor"]
    train = Run("actor.train", "actor", ALL)
    parameters, optimizer = (ALL, "parameters"), (ALL, "optimizer")
    assert of_actor == [
        Load("actor", *parameters),
        Reallocate("actor", ALL, HALF),
        Offload("actor", *parameters),
        Load("actor", *parameters),
        Load("actor", *optimizer),
        train,
        Offload("actor", *optimizer),
        Reallocate("actor", ALL, HALF, "ref", 0.125),
        Offload("actor", *parameters),
    ]


def test_offload_instructions_round_trip_through_text(programs: list[Program]) -> None:
    for program in programs:
        assert parse_program(format_program(program)) == program


@pytest.mark.parametrize("kind", [Load, Offload, Reallocate, Release])
def test_validation_finds_any_dropped_offload_instruction(programs: list[Program], kind: type) -> None:
    found = 0
    for rank, program in enumerate(programs):
        for i, instruction in enumerate(program.instructions):
            if isinstance(instruction, kind):
                left = program.instructions[:i] + program.instructions[i + 1 :]
                broken = [*programs[:rank], replace(program, instructions=left), *programs[rank + 1 :]]
                with pytest.raises(ProgramError):
                    check(broken)
                found += 1
    assert found


@pytest.mark.parametrize(
    ("offload", "optimizer", "complaint"),
    [
        (("ref",), (), "has the parameters of ref in device memory already"),
        (("actor", "ref", "reward"), ("actor",), "has the optimizer of critic in device memory already"),
    ],
)
def test_validation_finds_a_start_that_contradicts_the_plan(
    programs: list[Program], offload: tuple[str, ...], optimizer: tuple[str, ...], complaint: str
) -> None:
    start = offloaded(replace(PLAN, offload=offload, offload_optimizer=optimizer))
    with pytest.raises(ProgramError, match=complaint.replace("ref", "(ref|reward|actor)")):
        validate(programs, GRAPH, home_placements(GRAPH, PLAN), start)


def test_validation_finds_a_call_on_offloaded_parameters(programs: list[Program]) -> None:
    bare = [
        replace(p, instructions=tuple(i for i in p.instructions if not isinstance(i, Load | Offload)))
        for p in programs
    ]
    check_without = replace(PLAN, offload=(), offload_optimizer=())
    validate(bare, GRAPH, home_placements(GRAPH, PLAN), offloaded(check_without))
    for plan, what in (
        (replace(PLAN, offload_optimizer=()), "parameters"),
        (replace(PLAN, offload=()), "optimizer"),
    ):
        with pytest.raises(ProgramError, match=f"has the {what} of (actor|critic) in host memory"):
            validate(bare, GRAPH, home_placements(GRAPH, PLAN), offloaded(plan))


@pytest.mark.parametrize(
    ("role", "source", "complaint"),
    [
        ("critic", "actor", "trained or not used"),
        ("judge", "actor", "not used"),
        ("ref", "reward", "is not trained"),
    ],
)
def test_ema_is_of_a_trained_role_into_a_frozen_one(role: str, source: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        DataflowGraph(GRAPH.calls, GRAPH.keys.values(), [MovingAverage(role, source, 0.5)])
