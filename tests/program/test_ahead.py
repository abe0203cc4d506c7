"""Programs of graphs whose calls run ahead of training."""

import pickle
import random
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realrl.config.errors import DescriptionError
from realrl.dataflow.asynchrony import run_ahead
from realrl.dataflow.call import Call, Key, Kind
from realrl.dataflow.graph import DataflowGraph
from realrl.plan.cluster import Cluster
from realrl.plan.plan import Plan
from realrl.program.instructions import Feed, Program, Reallocate, Receive, Run, Send, ShareLengths
from realrl.program.lower import home_placements, kept_copies, lower, lower_start, offloaded
from realrl.program.validate import (
    ProgramError,
    _DryRun,
    _Rank,
    select_batches,
    validate_ahead,
    validate_start,
)
from tests.program.test_copies import EIGHT, FOLLOWING, PPO, TWICE, place

TOOLS = DataflowGraph(
    [
        Call("a.generate", "a", Kind.GENERATE, ("x",), ("y", "l"), ("x",)),
        Call("tool", None, Kind.FUNCTION, ("y",), ("z",), ("y",), function="tool.py:call"),
        Call("rewrite.inference", "r", Kind.INFERENCE, ("z",), ("w",), ("z",)),
        Call("c.inference", "c", Kind.INFERENCE, ("w",), ("v",), ("w",)),
        Call("a.train", "a", Kind.TRAIN, ("w", "l", "v"), (), ("w",)),
        Call("c.train", "c", Kind.TRAIN, ("w", "v"), (), ("w",)),
    ],
    [
        *(Key(name, "int64") for name in "xyzw"),
        Key("l", "float32", "y"),
        Key("v", "float32", "w"),
    ],
)
"""The lengths that divide the items of training become known two calls after generation."""
GRAPHS = {"ppo": PPO, "following": FOLLOWING, "twice": TWICE, "tools": TOOLS}


def compile_ahead(graph: DataflowGraph, plan: Plan) -> dict[range, list[Program]]:
    """Compile all programs of a plan, and validate them."""
    homes = home_placements(graph, plan)
    kept = kept_copies(graph, plan, homes)
    validate_start(lower_start(plan, homes, kept), homes, offloaded(plan), kept)
    made: dict[range, list[Program]] = {}

    def programs_of(batches: range) -> list[Program]:
        return made.setdefault(batches, lower(graph, plan, homes, kept, batches=batches))

    validate_ahead(programs_of, graph, homes, offloaded(plan), kept)
    return made


@settings(max_examples=120, deadline=None)
@given(st.data(), st.sampled_from([*GRAPHS.values()]), st.integers(0, 3), st.integers(1, 3))
def test_any_plan_compiles_to_valid_programs(
    data: st.DataObject, graph: DataflowGraph, steps: int, span: int
) -> None:
    def some(roles: list[str]) -> tuple[str, ...]:
        return tuple(data.draw(st.lists(st.sampled_from(roles), unique=True))) if roles else ()

    graph = run_ahead(graph, steps, span)
    placements = {call.name: data.draw(st.sampled_from(EIGHT)) for call in graph.calls}
    trained = [role for role in graph.roles if graph.trained(role)]
    plan = Plan(Cluster(1, 8), placements, some([*graph.roles]), some(trained), some([*graph.roles]))
    plan.check(graph)
    compile_ahead(graph, plan)


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from([*GRAPHS.values()]))
def test_calls_may_run_ahead_by_any_steps_that_do_not_grow_along_an_edge(
    data: st.DataObject, graph: DataflowGraph
) -> None:
    ahead: dict[str, int] = {}
    for call in reversed(graph.order):
        least = max((ahead[o.name] for o in graph.calls if set(call.outputs) & set(o.inputs)), default=0)
        ahead[call.name] = 0 if call.kind is Kind.TRAIN else data.draw(st.integers(least, 3))
    calls = [replace(call, ahead=ahead[call.name]) for call in graph.calls]
    graph = DataflowGraph(calls, graph.keys.values(), graph.averages)
    compile_ahead(graph, Plan(Cluster(1, 8), {c.name: data.draw(st.sampled_from(EIGHT)) for c in calls}))


def apart(graph: DataflowGraph, keep: tuple[str, ...] = ()) -> Plan:
    """Generate on two ranks, and do everything else on two others."""
    placements = {
        call.name: place(2, 2) if call.kind is Kind.GENERATE else place(0, 2) for call in graph.calls
    }
    return Plan(Cluster(1, 4), placements, (), (), keep)


def test_generation_and_training_of_a_step_wait_only_at_its_ends() -> None:
    graph = run_ahead(PPO, 1)
    programs = compile_ahead(graph, apart(graph, keep=("actor",)))[range(2)]

    def kinds(rank: int) -> list[str]:
        shown = [i.call if isinstance(i, Run) else type(i).__name__ for i in programs[rank].instructions]
        return [name for name in shown if name != "Report"]

    sampling = kinds(2)
    assert sampling[:4] == ["Feed", "actor.generate", "ShareLengths", "Reallocate"]
    assert sampling[4] == "ShareLengths" and {*sampling[5:]} == {"Send"}
    training, later = kinds(0), programs[0].instructions
    delivered = [
        position
        for position, i in enumerate(later)
        if isinstance(i, Receive | ShareLengths)
        and "actor.generate" in (getattr(i, "producer", None), getattr(i, "call", None))
    ]
    trained = [position for position, i in enumerate(later) if isinstance(i, Run)]
    assert min(delivered) > max(trained) and "actor.train" in training


@pytest.mark.parametrize("kind", [Feed, Run, Send, Receive, ShareLengths, Reallocate])
@pytest.mark.parametrize(("steps", "span"), [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize("name", GRAPHS)
def test_validation_finds_any_dropped_instruction(kind: type, steps: int, span: int, name: str) -> None:
    graph = run_ahead(GRAPHS[name], steps, span)
    plan = apart(graph)
    homes = home_placements(graph, plan)
    made = compile_ahead(graph, plan)

    def drop(programs: Sequence[Program], rank: int, position: int) -> list[Program]:
        changed = [*programs[rank].instructions]
        del changed[position]
        return [replace(p, instructions=tuple(changed)) if p.rank == rank else p for p in programs]

    for batches, programs in made.items():
        for program in programs:
            for position, instruction in enumerate(program.instructions):
                if isinstance(instruction, kind) and not (
                    isinstance(instruction, Feed) and not graph.sources
                ):
                    broken = made | {batches: drop(programs, program.rank, position)}
                    with pytest.raises(ProgramError):
                        validate_ahead(broken.__getitem__, graph, homes)


class Failure(Exception):
    """A rank fails in the middle of a step."""


class Adversary(_DryRun):
    """A dry run in which any rank may be the next to go on.

    In each step, some ranks are much slower than others, as with long answers or slow rewards. Any rank may fail.
    """

    def __init__(self, *arguments: Any, chance: random.Random, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.chance = chance
        self.waits: list[float] = []
        self.failing = 0.0

    def run(self, programs: Sequence[Program], batches: Collection[int] = (0,)) -> None:
        self.waits = [self.chance.choice([0.0, 0.3, 0.95]) for _ in self.ranks]
        self.failing = self.chance.choice([0.0, 0.0, 0.0, 1e-3])
        super().run(programs, batches)

    def _advance(self, rank: _Rank) -> bool:
        if rank.current is not None and self.chance.random() < self.failing:
            raise Failure
        # A rank that is slow counts as one that goes on later, so that no deadlock is reported.
        return self.chance.random() < self.waits[self.ranks.index(rank)] or super()._advance(rank)


@pytest.mark.parametrize("count", [250, pytest.param(2500, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(("steps", "span"), [(1, 1), (3, 1), (1, 3), (0, 2)])
def test_steps_of_slow_and_failing_ranks_neither_hang_nor_wait_for_ever(
    steps: int, span: int, count: int
) -> None:
    graph = run_ahead(TOOLS, steps, span)
    plan = Plan(
        Cluster(1, 3),
        {
            c.name: place(2, 1) if c.kind in (Kind.GENERATE, Kind.FUNCTION) else place(0, 2)
            for c in graph.calls
        },
    )
    made = compile_ahead(graph, plan)
    chance, homes = random.Random(steps), home_placements(graph, plan)
    run = Adversary(3, graph, homes, (), {}, {}, copies_there=True, done={}, chance=chance)
    step, failures = -graph.ahead, 0
    saved = pickle.dumps((run, step))
    while step < count:
        batches = select_batches(graph, step, count=count)
        try:
            # This raises an error if a rank hangs, a batch misses a call, or its samples are too old.
            run.run(made[batches], batches)
        except Failure:
            failures += 1
            run, step = pickle.loads(saved)
            run.chance = chance  # the next attempt goes otherwise
            continue
        assert all(len(known) <= graph.ahead for known in run.under_way())
        step += 1
        if step % 10 == 0:
            saved = pickle.dumps((run, step))  # with the batches under way
    assert not any(run.under_way()) and failures > count / 100


def test_a_batch_that_waits_for_rows_that_never_come_is_found_before_the_run() -> None:
    """As in SkyRL#1173 and NeMo-RL#3238, where training waited for a batch that could not become complete."""
    graph = run_ahead(PPO, 2)
    plan = apart(graph)
    made = compile_ahead(graph, plan)

    def lose_samples(program: Program) -> Program:
        lost = [i for i in program.instructions if isinstance(i, Send) and i.producer == "actor.generate"]
        kept = tuple(i for i in program.instructions if i not in lost[:1])
        return replace(program, instructions=kept) if program.rank == 3 else program

    broken = {batches: [*map(lose_samples, programs)] for batches, programs in made.items()}
    with pytest.raises(ProgramError, match="deadlock: no rank can continue"):
        validate_ahead(broken.__getitem__, graph, home_placements(graph, plan))


def test_a_call_cannot_run_further_ahead_than_its_inputs() -> None:
    calls = [replace(call, ahead=1 if call.kind is Kind.INFERENCE else 0) for call in PPO.calls]
    with pytest.raises(DescriptionError, match=r"inference runs 1 step ahead, but actor\.generate"):
        DataflowGraph(calls, PPO.keys.values())


def test_the_first_and_the_last_steps_have_programs_of_their_own() -> None:
    graph = run_ahead(PPO, 1)
    assert compile_ahead(graph, apart(graph)).keys() == {range(1, 2), range(2), range(1)}


def test_only_functions_that_need_no_trained_model_run_before_training() -> None:
    """A function of the critic's values waits for the latest critic. One of a frozen model's outputs does not."""
    judged = {"ref.inference": 2, "critic.inference": 0}
    for name, expected in judged.items():
        made = next(call for call in PPO.calls if call.name == name).outputs[0]
        function = Call(
            "judge", None, Kind.FUNCTION, (made,), ("verdict",), (made,), function="judge.py:call"
        )
        calls = [
            replace(call, inputs=(*call.inputs, "verdict")) if call.name == "actor.train" else call
            for call in PPO.calls
        ]
        graph = run_ahead(DataflowGraph([*calls, function], [*PPO.keys.values(), Key("verdict", "int64")]), 3)
        ahead = {call.name: call.ahead for call in graph.calls}
        assert (ahead["judge"], ahead[name], ahead["actor.generate"]) == (expected, expected, 3)


def test_a_call_that_trains_cannot_run_ahead() -> None:
    with pytest.raises(DescriptionError, match=r"a\.train: ahead=1"):
        replace(TWICE.call("a.train"), ahead=1)


@pytest.mark.parametrize("ahead", [0, 1, 3])
@pytest.mark.parametrize("first", [0, 4])
@pytest.mark.parametrize("count", [1, 2, 5, 9])
def test_every_batch_is_processed_once_by_every_call(ahead: int, first: int, count: int) -> None:
    calls = [replace(call, ahead=ahead if call.kind is Kind.GENERATE else 0) for call in TWICE.calls]
    graph = DataflowGraph(calls, TWICE.keys.values())
    seen: dict[int, list[int]] = {}
    for step in range(first - ahead, max(first, count)):
        for offset in select_batches(graph, step, first=first, count=count):
            seen.setdefault(offset, []).append(step + offset)
    assert seen == ({o: list(range(first, count)) for o in range(ahead + 1)} if first < count else {})
