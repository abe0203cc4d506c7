"""Programs of roles that are trained in part: which parameter set is moved, released and offloaded when."""

from dataclasses import replace

import pytest

from realrl.algorithms.ppo import train_graph
from realrl.dataflow.call import MovingAverage
from realrl.dataflow.graph import DataflowGraph
from realrl.layout.sets import BASE, TUNED, WHOLE, TrainablePart
from realrl.plan.cluster import Cluster
from realrl.plan.placement import Mesh, Placement, Strategy
from realrl.plan.plan import Plan
from realrl.program.instructions import Load, Offload, Program, Reallocate, Release
from realrl.program.lower import home_placements, kept_copies, lower, lower_start, offloaded
from realrl.program.text import format_program, parse_program
from realrl.program.validate import ProgramError, validate, validate_start

PPO = train_graph(minibatches=1)
PARTS = {"actor": TrainablePart(last_layers=2), "critic": TrainablePart(freeze_embeddings=True)}
ALL = Placement(Mesh(0, 2), Strategy(dp=2))
CUT = Placement(Mesh(0, 2), Strategy(tp=2))


def plan(**more: tuple[str, ...]) -> Plan:
    """Everything on both ranks, but the actor generates in another layout than it is trained in."""
    placements = {call.name: ALL for call in PPO.calls} | {"actor.generate": CUT}
    return Plan(Cluster(1, 2), placements, **more)


def compiled(
    of: Plan, graph: DataflowGraph = PPO, parts: dict[str, TrainablePart] = PARTS
) -> tuple[Program, Program]:
    """Valid programs of rank 0: of the start, and of a step."""
    homes = home_placements(graph, of)
    kept = kept_copies(graph, of, homes)
    start, step = lower_start(of, homes, kept, parts), lower(graph, of, homes, kept, parts)
    validate_start(start, homes, offloaded(of), kept, parts)
    validate(step, graph, homes, offloaded(of), kept, parts)
    return start[0], step[0]


def moved(program: Program, kind: type, role: str = "actor") -> list[str]:
    """The sets of a role in instructions of a kind."""
    return [i.parameter_set for i in program.instructions if isinstance(i, kind) and i.role == role]


def test_a_kept_copy_gets_only_what_training_has_changed() -> None:
    start, step = compiled(plan(keep=("actor",)))
    assert moved(start, Reallocate) == [BASE, TUNED]
    assert moved(step, Reallocate) == [TUNED] and moved(step, Release) == []


def test_a_copy_that_is_made_for_a_step_gets_all_sets() -> None:
    _, step = compiled(plan())
    assert moved(step, Reallocate) == [BASE, TUNED] == moved(step, Release)


def test_every_set_is_offloaded_and_of_optimizers_that_of_the_trained_one() -> None:
    _, step = compiled(plan(offload=("critic", "ref"), offload_optimizer=("critic",)))
    for kind in (Load, Offload):
        critic = [i for i in step.instructions if isinstance(i, kind) and i.role == "critic"]
        assert {i.parameter_set for i in critic if i.state == "parameters"} == {BASE, TUNED}
        assert {i.parameter_set for i in critic if i.state == "optimizer"} == {TUNED}
        assert set(moved(step, kind, "ref")) == {BASE}


@pytest.mark.parametrize(("same_start", "expected"), [(True, [TUNED]), (False, [BASE, TUNED])])
def test_a_reference_follows_in_every_set_that_may_differ(same_start: bool, expected: list[str]) -> None:
    graph = train_graph(minibatches=1, averages=[MovingAverage("ref", "actor", 0.5, same_start)])
    parts = PARTS | {"ref": PARTS["actor"]}
    _, step = compiled(plan(keep=("actor",)), graph, parts)
    mixed = [i for i in step.instructions if isinstance(i, Reallocate) and i.into == "ref"]
    assert [i.parameter_set for i in mixed] == expected


def test_programs_with_sets_have_a_text_form() -> None:
    of = plan(keep=("actor",), offload=("actor", "critic"), offload_optimizer=("actor",))
    for program in compiled(of):
        assert parse_program(format_program(program)) == program
    text = format_program(compiled(of)[1])
    assert "reallocate actor/tuned: d2 t1 p1 @0-1" in text and "load       actor/tuned optimizer:" in text
    assert "offload    critic parameters:" in text, "the set `base` is not written"


def test_programs_of_one_set_are_the_same_whether_it_is_said_or_not() -> None:
    of = plan(keep=("actor",), offload=("ref",), offload_optimizer=("critic",))
    assert compiled(of, parts={}) == compiled(of, parts=dict.fromkeys(PPO.roles, WHOLE))


@pytest.mark.parametrize(
    ("kind", "name"), [(Reallocate, BASE), (Reallocate, TUNED), (Release, BASE), (Load, TUNED)]
)
def test_a_program_that_forgets_a_set_is_refused(kind: type, name: str) -> None:
    of = plan(offload=("critic",))
    homes = home_placements(PPO, of)
    programs = [
        replace(
            p,
            instructions=tuple(
                i for i in p.instructions if not (isinstance(i, kind) and i.parameter_set == name)
            ),
        )
        for p in lower(PPO, of, homes, {}, PARTS)
    ]
    with pytest.raises(ProgramError):
        validate(programs, PPO, homes, offloaded(of), {}, PARTS)
