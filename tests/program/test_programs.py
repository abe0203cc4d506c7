"""Programs: what lowering emits, that text round-trips, and that the validator finds what is wrong."""

from dataclasses import replace

import pytest

from realrl.algorithms.ppo import train_graph
from realrl.dataflow.call import Call, Key, Kind
from realrl.dataflow.graph import DataflowGraph
from realrl.plan.cluster import Cluster
from realrl.plan.placement import Mesh, Placement, Strategy
from realrl.plan.plan import Plan
from realrl.program.instructions import (
    Feed,
    Instruction,
    Program,
    Reallocate,
    Receive,
    Release,
    Report,
    Run,
    Send,
    ShareLengths,
)
from realrl.program.lower import home_placements, lower
from realrl.program.text import format_program, parse_instruction, parse_program
from realrl.program.validate import ProgramError, validate

PPO = train_graph(minibatches=2)


def place(first: int, dp: int, budget: int = 512) -> Placement:
    return Placement(Mesh(first, dp), Strategy(dp=dp, micro_batch_tokens=budget))


def plan(default: Placement, size: int, **calls: Placement) -> Plan:
    named = {name.replace("__", "."): placement for name, placement in calls.items()}
    return Plan(Cluster(1, size), {call.name: named.get(call.name, default) for call in PPO.calls})


PLANS = {
    "one": plan(place(0, 1), 1),
    "symmetric": plan(place(0, 2), 2),
    "generation elsewhere": plan(place(0, 2), 4, actor__generate=place(2, 2)),
    "roles apart": plan(
        place(0, 1),
        4,
        critic__inference=place(1, 1),
        critic__train=place(1, 1),
        ref__inference=place(2, 1),
        reward__inference=place(3, 1),
    ),
    "writer idle": plan(place(2, 2), 4),
}


@pytest.fixture(params=PLANS.values(), ids=PLANS.keys())
def compiled(request: pytest.FixtureRequest) -> tuple[Plan, list[Program]]:
    chosen: Plan = request.param
    return chosen, lower(PPO, chosen, home_placements(PPO, chosen))


def check(chosen: Plan, programs: list[Program]) -> None:
    validate(programs, PPO, home_placements(PPO, chosen))


def test_lowered_programs_are_valid(compiled: tuple[Plan, list[Program]]) -> None:
    check(*compiled)


def test_every_call_runs_on_exactly_its_ranks(compiled: tuple[Plan, list[Program]]) -> None:
    chosen, programs = compiled
    for call in PPO.calls:
        running = [
            p.rank
            for p in programs
            if any(isinstance(i, Run) and i.call == call.name for i in p.instructions)
        ]
        assert running == list(chosen[call.name].ranks)


def test_programs_round_trip_through_text(compiled: tuple[Plan, list[Program]]) -> None:
    for program in compiled[1]:
        assert parse_program(format_program(program)) == program


def test_parameters_move_only_where_layouts_differ() -> None:
    def moves(name: str) -> set[str]:
        chosen = PLANS[name]
        programs = lower(PPO, chosen, home_placements(PPO, chosen))
        return {i.role for p in programs for i in p.instructions if isinstance(i, Reallocate)}

    assert moves("symmetric") == moves("roles apart") == set()
    assert moves("generation elsewhere") == {"actor"}


def test_a_role_lives_where_it_is_trained() -> None:
    homes = home_placements(PPO, PLANS["generation elsewhere"])
    assert homes["actor"] == place(0, 2)


def test_text_that_is_no_instruction_is_refused() -> None:
    for line in ("", "jump there", "run actor.generate", "send keys: a -> b"):
        with pytest.raises(ValueError, match="not an instruction"):
            parse_instruction(line)


@pytest.mark.parametrize("kind", [Receive, Send, ShareLengths, Report, Run, Reallocate])
@pytest.mark.parametrize("name", ["generation elsewhere", "roles apart"])
def test_validation_finds_any_dropped_instruction(kind: type, name: str) -> None:
    chosen = PLANS[name]
    programs = lower(PPO, chosen, home_placements(PPO, chosen))
    for rank, program in enumerate(programs):
        for i, instruction in enumerate(program.instructions):
            if not isinstance(instruction, kind):
                continue
            left = program.instructions[:i] + program.instructions[i + 1 :]
            broken = [*programs[:rank], replace(program, instructions=left), *programs[rank + 1 :]]
            with pytest.raises(ProgramError):
                check(chosen, broken)


def test_crossed_waits_are_reported_as_deadlock_with_the_position_of_each_rank() -> None:
    keys = [Key("x", "int64"), Key("y", "float32", "one"), Key("z", "float32", "one")]
    graph = DataflowGraph(
        [
            Call("a.inference", "a", Kind.INFERENCE, ("x",), ("y",), ("x",)),
            Call("b.inference", "b", Kind.INFERENCE, ("x",), ("z",), ("x",)),
        ],
        keys,
    )
    both = place(0, 2)
    chosen = Plan(Cluster(1, 2), {"a.inference": both, "b.inference": both})
    first, second = lower(graph, chosen, home_placements(graph, chosen))
    runs = [i for i, instruction in enumerate(second.instructions) if isinstance(instruction, Run)]
    swapped = list(second.instructions)
    swapped[runs[0]], swapped[runs[1]] = swapped[runs[1]], swapped[runs[0]]
    with pytest.raises(ProgramError, match=r"deadlock.*\n.*rank 0.*ERROR HERE\n.*rank 1.*ERROR HERE"):
        validate([first, replace(second, instructions=tuple(swapped))], graph, home_placements(graph, chosen))


def test_validation_finds_a_call_before_its_parameters_arrive() -> None:
    chosen = PLANS["generation elsewhere"]
    programs = lower(PPO, chosen, home_placements(PPO, chosen))
    late = []
    for program in programs:
        moved = [i for i in program.instructions if isinstance(i, Reallocate)]
        rest = [i for i in program.instructions if not isinstance(i, Reallocate)]
        late.append(replace(program, instructions=(*rest, *moved)))
    with pytest.raises(ProgramError, match="no parameters of actor"):
        check(chosen, late)


def late_lengths() -> tuple[DataflowGraph, Plan]:
    """Step in which the rows of `a` are there before the lengths by which the items of their reader are divided."""
    graph = DataflowGraph(
        [
            Call("a.inference", "a", Kind.INFERENCE, ("x",), ("f",), ("x",)),
            Call("c.inference", "c", Kind.INFERENCE, ("x",), ("g",), ("x",)),
            Call("b.generate", "b", Kind.GENERATE, ("x",), ("s",), ("x",)),
            Call("b.train", "b", Kind.TRAIN, ("s", "f", "g"), (), ("s",)),
        ],
        [Key("x", "int64"), Key("f", "float32", "one"), Key("g", "float32", "x"), Key("s", "int64")],
    )
    chosen = Plan(Cluster(1, 4), {c.name: place(0, 2) for c in graph.calls} | {"c.inference": place(2, 2)})
    return graph, chosen


def test_rows_wait_until_their_senders_know_how_the_readers_items_are_divided() -> None:
    graph, chosen = late_lengths()
    programs = lower(graph, chosen, home_placements(graph, chosen))
    validate(programs, graph, home_placements(graph, chosen))
    for program in programs[2:]:
        kinds = [type(i) for i in program.instructions if isinstance(i, Run | ShareLengths | Send)]
        assert kinds == [Run, ShareLengths, Send]


def test_validation_finds_rows_sent_before_the_lengths_that_divide_their_readers_items() -> None:
    graph, chosen = late_lengths()
    programs = lower(graph, chosen, home_placements(graph, chosen))
    early = list(programs[3].instructions)
    share = next(i for i, instruction in enumerate(early) if isinstance(instruction, ShareLengths))
    early[share], early[share + 1] = early[share + 1], early[share]
    broken = [*programs[:3], replace(programs[3], instructions=tuple(early))]
    with pytest.raises(ProgramError, match=r"rank 3 does not know how long s is, by .* b\.train"):
        validate(broken, graph, home_placements(graph, chosen))


def test_validation_finds_a_call_on_parameters_that_are_trained_already() -> None:
    graph = DataflowGraph(
        [
            Call("a.inference", "a", Kind.INFERENCE, ("x",), ("y",), ("x",)),
            Call("a.train", "a", Kind.TRAIN, ("x",), (), ("x",)),
        ],
        [Key("x", "int64"), Key("y", "float32", "one")],
    )
    here, there = place(0, 1), place(1, 1)
    chosen = Plan(Cluster(1, 2), {"a.inference": there, "a.train": here})
    move, use = Reallocate("a", here, there), Run("a.inference", "a", there)
    update, word, drop = Run("a.train", "a", here), Report("a.train", (0,), 1), Release("a", there)

    def run(*order: Instruction) -> None:
        members = {move: (0, 1), use: (1,), update: (0,), word: (0, 1), drop: (1,)}
        programs = [Program(r, (Feed(("x",)), *(i for i in order if r in members[i]))) for r in (0, 1)]
        validate(programs, graph, home_placements(graph, chosen))

    run(move, use, drop, update, word)
    # A copy from the start of the step is what the call needs, even if other ranks are training already.
    run(move, update, word, use, drop)
    with pytest.raises(ProgramError, match="rank 1 has other parameters of a than at the start of the step"):
        run(update, word, move, use, drop)
