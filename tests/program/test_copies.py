"""Copies of parameters outside a role's home: when they are made, refreshed and given up."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realrl.algorithms.ppo import train_graph
from realrl.dataflow.call import Call, Key, Kind, MovingAverage
from realrl.dataflow.graph import DataflowGraph
from realrl.plan.cluster import Cluster
from realrl.plan.placement import Mesh, Placement, Strategy
from realrl.plan.plan import Plan
from realrl.plan.presets import PRESETS, make_plan
from realrl.program.instructions import Instruction, Program, Reallocate, Release, Run
from realrl.program.lower import home_placements, kept_copies, lower, lower_start, offloaded, waves
from realrl.program.validate import ProgramError, validate, validate_start

PPO = train_graph(minibatches=1)
FOLLOWING = train_graph(minibatches=1, averages=[MovingAverage("ref", "actor", 0.1)])
KEYS = (*(Key(name, "int64") for name in "xyz"), Key("s", "float32", "one"), Key("t", "float32", "one"))
TWICE = DataflowGraph(
    [
        Call("a.generate", "a", Kind.GENERATE, ("x",), ("y",), ("x",)),
        Call("b.inference", "b", Kind.INFERENCE, ("y",), ("s",), ("y",)),
        Call("a.inference", "a", Kind.INFERENCE, ("y",), ("z",), ("y",)),
        Call("b.again", "b", Kind.INFERENCE, ("z",), ("t",), ("z",)),
        Call("a.train", "a", Kind.TRAIN, ("z", "s", "t"), (), ("z",)),
    ],
    KEYS,
)
"""Two roles, one frozen, that are each used twice before training."""


def place(first: int, dp: int, tp: int = 1, pp: int = 1) -> Placement:
    return Placement(Mesh(first, dp * tp * pp), Strategy(dp=dp, tp=tp, pp=pp))


HOME, AWAY, FURTHER = place(0, 2), place(2, 1, 2), place(2, 1, 1, 2)


def twice(
    *, b: Placement, b_again: Placement, keep: tuple[str, ...] = (), offload: tuple[str, ...] = ()
) -> Plan:
    """A plan for TWICE whose role `a` is used AWAY and trained at HOME."""
    placements = {"a.generate": AWAY, "a.inference": AWAY, "a.train": HOME}
    return Plan(Cluster(1, 4), placements | {"b.inference": b, "b.again": b_again}, offload, (), keep)


def compiled(graph: DataflowGraph, plan: Plan) -> tuple[list[Program], list[Program]]:
    """Valid programs: of the start, and of a step."""
    homes = home_placements(graph, plan)
    kept = kept_copies(graph, plan, homes)
    start, step = lower_start(plan, homes, kept), lower(graph, plan, homes, kept)
    validate_start(start, homes, offloaded(plan), kept)
    validate(step, graph, homes, offloaded(plan), kept)
    return start, step


def about(program: Program, role: str) -> list[str]:
    """What a rank does with a role, in short."""
    found = []
    for i in program.instructions:
        match i:
            case Run(call, r, _) if r == role:
                found.append(call)
            case Reallocate(r, source, target, _, _) if r == role:
                found.append(f"{source.layout} -> {target.layout}")
            case Release(r, _) if r == role:
                found.append("release")
    return found


def test_copies_are_made_once_per_step_and_released_after_their_last_use() -> None:
    start, step = compiled(TWICE, twice(b=HOME, b_again=HOME))
    assert not any(program.instructions for program in start)
    move = f"{HOME.layout} -> {AWAY.layout}"
    assert about(step[0], "a") == [move, "a.train"]
    assert about(step[2], "a") == [move, "a.generate", "a.inference", "release"]


def test_kept_copies_are_made_at_the_start_and_refreshed_once_per_update() -> None:
    start, step = compiled(TWICE, twice(b=HOME, b_again=HOME, keep=("a",)))
    move = f"{HOME.layout} -> {AWAY.layout}"
    assert [about(program, "a") for program in start] == [[move]] * 4
    assert about(step[0], "a") == ["a.train", move]
    assert about(step[2], "a") == ["a.generate", "a.inference", move]


def test_kept_copies_of_a_frozen_role_are_never_refreshed() -> None:
    plan = twice(b=HOME, b_again=FURTHER)
    assert sum("->" in line for line in about(compiled(TWICE, plan)[1][2], "b")) == 1
    start, step = compiled(TWICE, replace(plan, keep=("b",)))
    assert about(start[2], "b") == [f"{HOME.layout} -> {FURTHER.layout}"]
    assert about(step[2], "b") == ["b.again"]


def test_kept_copies_of_an_ema_role_are_refreshed_after_its_update() -> None:
    following = DataflowGraph(TWICE.calls, KEYS, [MovingAverage("b", "a", 0.5)])
    plan = make_plan("symmetric", following, Cluster(1, 4), 10)
    elsewhere = place(0, 1)
    plan = replace(plan, placements={**plan.placements, "b.again": elsewhere}, keep=("b",))
    programs = compiled(following, plan)[1]
    moves = [i for i in programs[0].instructions if isinstance(i, Reallocate)]
    assert [(m.role, m.into, m.target) for m in moves] == [
        ("a", "b", plan["b.inference"]),
        ("b", None, elsewhere),
    ]


def test_an_offloaded_home_is_loaded_only_while_its_copy_is_made() -> None:
    _, step = compiled(TWICE, twice(b=HOME, b_again=HOME, offload=("a", "b")))
    kinds = [type(i).__name__ for i in step[0].instructions if getattr(i, "role", "") == "a"]
    assert kinds == ["Load", "Reallocate", "Offload", "Load", "Run", "Offload"]
    kinds = [type(i).__name__ for i in step[0].instructions if getattr(i, "role", "") == "b"]
    assert kinds == ["Load", "Run", "Offload"] * 2


def test_validation_finds_a_kept_copy_that_is_not_refreshed() -> None:
    plan = twice(b=HOME, b_again=HOME, keep=("a",))
    homes = home_placements(TWICE, plan)
    kept = kept_copies(TWICE, plan, homes)

    def without(programs: list[Program], kind: type[Instruction]) -> list[Program]:
        return [
            replace(p, instructions=tuple(i for i in p.instructions if not isinstance(i, kind)))
            for p in programs
        ]

    start, step = compiled(TWICE, plan)
    with pytest.raises(ProgramError, match="rank 2 ends with an outdated a"):
        validate(without(step, Reallocate), TWICE, homes, (), kept)
    with pytest.raises(ProgramError, match="ends with other state in memory"):
        validate_start(without(start, Reallocate), homes, (), kept)


def test_calls_that_share_no_device_and_no_data_are_one_wave() -> None:
    plan = twice(b=HOME, b_again=HOME)
    names = [[call.name for call in wave] for wave in waves(TWICE, plan)]
    assert names == [["a.generate"], ["b.inference", "a.inference"], ["b.again"], ["a.train"]]


def test_reallocations_of_a_wave_precede_its_calls_on_every_rank() -> None:
    plan = make_plan("interleave", PPO, Cluster(1, 4), 10)
    for program in compiled(PPO, plan)[1]:
        names = [i.call if isinstance(i, Run) else type(i).__name__ for i in program.instructions]
        assert names.index("actor.generate") < names.index("Reallocate")
        assert all(
            names.index("Reallocate") < n for n, name in enumerate(names) if name.endswith(".inference")
        )


@pytest.mark.parametrize("cluster", ["1x4", "2x4", "5x3"])
@pytest.mark.parametrize("name", PRESETS)
def test_presets_compile_to_valid_programs(name: str, cluster: str) -> None:
    compiled(FOLLOWING, make_plan(name, FOLLOWING, Cluster.parse(cluster), 10))


EIGHT = [
    place(first, dp, tp, pp)
    for dp in (1, 2, 4, 8)
    for tp in (1, 2, 4, 8)
    for pp in (1, 2, 4, 8)
    if dp * tp * pp <= 8
    for first in range(0, 8, dp * tp * pp)
]


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from([PPO, FOLLOWING, TWICE]))
def test_any_plan_compiles_to_valid_programs(data: st.DataObject, graph: DataflowGraph) -> None:
    def some(roles: list[str]) -> tuple[str, ...]:
        return tuple(data.draw(st.lists(st.sampled_from(roles), unique=True))) if roles else ()

    placements = {call.name: data.draw(st.sampled_from(EIGHT)) for call in graph.calls}
    trained = [role for role in graph.roles if graph.trained(role)]
    plan = Plan(Cluster(1, 8), placements, some([*graph.roles]), some(trained), some([*graph.roles]))
    plan.check(graph)
    compiled(graph, plan)
