"""Programs, simulated with durations that are easy to add up."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest

from realrl.dataflow.call import Call, Key, Kind
from realrl.dataflow.graph import DataflowGraph
from realrl.plan.cluster import Cluster
from realrl.plan.placement import Placement
from realrl.plan.plan import Plan
from realrl.planner.simulate.simulator import SimulationError, simulate
from realrl.program.instructions import (
    Instruction,
    Load,
    Offload,
    Program,
    Reallocate,
    Receive,
    Run,
    ShareLengths,
)
from realrl.program.lower import home_placements, kept_copies, lower

A_CHAIN = DataflowGraph(
    [
        Call("a.generate", "a", Kind.GENERATE, ("x",), ("s",), work=("x",)),
        Call("r.inference", "r", Kind.INFERENCE, ("s",), ("f",), work=("s",)),
        Call("b.train", "b", Kind.TRAIN, ("s", "f"), work=("s",)),
    ],
    [Key("x", "int64"), Key("s", "int64"), Key("f", "float32", "s")],
)
SECONDS = {"a.generate": 4.0, "r.inference": 2.0, "b.train": 8.0}


def programs(*placements: str, **changes: tuple[str, ...]) -> list[Program]:
    """Of the chain, whose calls have these placements, on four devices."""
    calls = [call.name for call in A_CHAIN.calls]
    places = {name: Placement.parse(f"{text} mb=9") for name, text in zip(calls, placements, strict=True)}
    plan = replace(Plan(Cluster(1, 4), places), **changes)
    homes = home_placements(A_CHAIN, plan)
    return lower(A_CHAIN, plan, homes, kept_copies(A_CHAIN, plan, homes))


def seconds(receiving: float = 0.0, copying: float = 0.0) -> Callable[[Instruction], float]:
    def duration(instruction: Instruction) -> float:
        match instruction:
            case Run(call):
                return SECONDS[call]
            case Receive():
                return receiving
            case Load() | Offload():
                return copying
            case _:
                return 0.0

    return duration


APART = ("d1 t1 p1 @0", "d1 t1 p1 @1", "d2 t1 p1 @2-3")
TOGETHER = ("d4 t1 p1 @0-3",) * 3


def test_calls_on_the_same_devices_run_one_after_the_other() -> None:
    simulation = simulate(programs(*TOGETHER), seconds())
    assert simulation.step_seconds == simulation.repeated_seconds == 14.0


def test_inputs_from_several_calls_arrive_one_after_the_other() -> None:
    # 4, 1 to receive, 2; then two keys, of which the first has come long before.
    assert simulate(programs(*APART), seconds(receiving=1.0)).step_seconds == 4 + 1 + 2 + 1 + 8


def test_ranks_that_finish_a_step_start_the_next() -> None:
    simulation = simulate(programs("d1 t1 p1 @1", "d1 t1 p1 @0", "d2 t1 p1 @2-3"), seconds())
    assert simulation.step_seconds == 14.0
    # Generation is ahead of training; rank 0, which scores, waits for the figures of the step before.
    assert simulation.repeated_seconds == 2.0 + 8.0


def test_a_rank_ends_its_step_only_when_its_messages_are_received() -> None:
    simulation = simulate(programs(*APART), seconds(), steps=4)
    generated = [s for s in simulation.events[0] if isinstance(s.instruction, Run)]
    received = [s for s in simulation.events[2] if isinstance(s.instruction, Receive)]
    for step in range(1, 4):
        taken = max(s.start + s.seconds for s in received if s.step == step - 1)
        assert generated[step].start >= taken


def test_calls_wait_for_the_last_of_their_devices() -> None:
    simulation = simulate(programs("d1 t1 p1 @0", "d1 t1 p1 @1", "d4 t1 p1 @0-3"), seconds())
    runs = {
        rank: s
        for rank, row in enumerate(simulation.slices(0))
        for s in row
        if _runs(s.instruction, "b.train")
    }
    assert [s.start + s.waiting for s in runs.values()] == [6.0] * 4
    assert [s.start + s.seconds for s in runs.values()] == [14.0] * 4
    assert runs[0].waiting == runs[1].waiting == 0.0


def _runs(instruction: Instruction, call: str) -> bool:
    return isinstance(instruction, Run) and instruction.call == call


def test_ranks_that_receive_lengths_wait_for_output_ranks() -> None:
    simulation = simulate(programs(*APART), seconds())
    (length_receivers,) = [s for s in simulation.slices(0)[3] if isinstance(s.instruction, ShareLengths)]
    assert length_receivers.start + length_receivers.seconds == 4.0


def test_slices_are_the_program_of_the_rank_without_gaps() -> None:
    found = programs("d1 t4 p1 @0-3", "d1 t1 p1 @1", "d2 t1 p2 @0-3", offload=("r",))
    simulation = simulate(found, seconds(0.5, 0.25))
    for step in (0, 1):
        for program, row in zip(found, simulation.slices(step), strict=True):
            assert tuple(s.instruction for s in row) == program.instructions
            assert {s.rank for s in row} == {program.rank} and {s.step for s in row} == {step}
            for before, after in pairwise(row):
                assert after.start == pytest.approx(before.start + before.seconds)


def test_loading_occupies_only_the_ranks_that_load() -> None:
    plain, offloading = (simulate(programs(*APART, offload=o), seconds(copying=3.0)) for o in ((), ("r",)))
    # While generation goes on; what is put back nobody waits for.
    assert offloading.step_seconds == plain.step_seconds + 3.0
    assert offloading.ends[0] == 4 + 3 + 2 + 8


def test_repeated_instructions_are_distinct_events() -> None:
    run = Run("a.generate", "a", Placement.parse("d2 t1 p1 @0-1 mb=9"))
    simulation = simulate([Program(rank, (run, run)) for rank in range(2)], seconds(), steps=1)
    assert simulation.ends == (8.0,)


def test_deadlocks_name_the_instructions_that_ranks_wait_for() -> None:
    first, second = (
        Run(name, "a", Placement.parse("d2 t1 p1 @0-1 mb=9")) for name in ("a.generate", "b.train")
    )
    with pytest.raises(SimulationError, match=r"rank 0 at run +a\.generate .* rank 1 at run +b\.train"):
        simulate([Program(0, (first, second)), Program(1, (second, first))], seconds())


@pytest.mark.parametrize(("moving", "begins"), [(0.0, 1.0), (2.0, 7.0)])
def test_ranks_do_not_wait_for_a_reallocation_that_sends_nothing(moving: float, begins: float) -> None:
    keys = [Key("x", "int64"), *(Key(name, "float32", "x") for name in "fgh")]
    graph = DataflowGraph(
        [
            Call("a.inference", "a", Kind.INFERENCE, ("x",), ("f",), work=("x",)),
            Call("r.inference", "r", Kind.INFERENCE, ("x",), ("g",), work=("x",)),
            Call("b.inference", "b", Kind.INFERENCE, ("x",), ("h",), work=("x",)),
            Call("b.train", "b", Kind.TRAIN, ("x", "f", "g", "h"), work=("x",)),
        ],
        keys,
    )
    ranks = {"a.inference": "d1 t1 p1 @0", "r.inference": "d1 t1 p1 @1", "b.inference": "d1 t1 p1 @0"}
    texts = {**ranks, "b.train": "d2 t1 p1 @0-1"}
    plan = Plan(Cluster(1, 2), {name: Placement.parse(f"{text} mb=9") for name, text in texts.items()})
    homes = home_placements(graph, plan)
    times = {"a.inference": 1.0, "r.inference": 5.0, "b.inference": 1.0, "b.train": 1.0}

    def duration(instruction: Instruction) -> float:
        if isinstance(instruction, Run):
            return times[instruction.call]
        return moving if isinstance(instruction, Reallocate) else 0.0

    # Rank 1, where b lives, too, comes to the reallocation after five seconds.
    slices = simulate(lower(graph, plan, homes, kept_copies(graph, plan, homes)), duration).slices(0)[0]
    assert [s.start for s in slices if _runs(s.instruction, "b.inference")] == [begins]
