"""Programs of steps that hand on their samples in portions."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realrl.config.errors import DescriptionError, UserError
from realrl.dataflow.asynchrony import find_portion_problem, hand_on_portions, overlap_all, overlap_sampling
from realrl.dataflow.call import Call, Key, Kind
from realrl.dataflow.graph import DataflowGraph
from realrl.plan.cluster import Cluster
from realrl.plan.plan import Plan
from realrl.program.instructions import (
    OfPortion,
    Program,
    Reallocate,
    Receive,
    Release,
    Report,
    Run,
    Send,
)
from realrl.program.lower import home_placements, kept_copies
from realrl.program.order import producers
from realrl.program.portions import lower_step, validate_portions
from realrl.program.text import format_program, parse_program
from realrl.program.validate import ProgramError
from tests.program.test_copies import EIGHT, FOLLOWING, PPO

FIRST = [place for place in EIGHT if place.mesh.first + place.mesh.size <= 4]
LAST = [place for place in EIGHT if place.mesh.first >= 4]
GRAPHS = {"ppo": PPO, "following": FOLLOWING}


def compile_portions(graph: DataflowGraph, plan: Plan) -> list[Program]:
    homes = home_placements(graph, plan)
    kept = kept_copies(graph, plan, homes)
    validate_portions(graph, plan, homes, kept, {})
    return lower_step(graph, plan, homes, kept, {})


def part(graph: DataflowGraph, **decisions: Any) -> Plan:
    """Generate on the last four devices, and run all other calls on the first four."""
    placements = {call.name: LAST[-1] if call.kind is Kind.GENERATE else FIRST[0] for call in graph.calls}
    return Plan(Cluster(1, 8), placements, **decisions)


@settings(max_examples=80, deadline=None)
@given(st.data(), st.sampled_from([*GRAPHS.values()]), st.integers(2, 5))
def test_any_plan_with_sampling_apart_compiles_to_valid_programs(
    data: st.DataObject, graph: DataflowGraph, portions: int
) -> None:
    def some(roles: list[str]) -> tuple[str, ...]:
        return tuple(data.draw(st.lists(st.sampled_from(roles), unique=True)))

    graph = hand_on_portions(graph, portions)
    placements = {
        call.name: data.draw(st.sampled_from(LAST if call.kind is Kind.GENERATE else FIRST))
        for call in graph.calls
    }
    plan = Plan(Cluster(1, 8), placements, some([*graph.roles]), keep=some([*graph.roles]))
    plan.check(graph)
    programs = compile_portions(graph, plan)
    for program in programs:
        assert parse_program(format_program(program)) == program
        runs = Counter(i.call for i in program.instructions if isinstance(i, Run))
        assert set(runs.values()) <= {portions}
        # What a rank does for a portion comes after everything that it does for earlier portions, except sampling.
        order = [i.portion for i in program.instructions if isinstance(i, OfPortion)]
        assert order == sorted(order)
    sent = Counter(i.number for p in programs for i in p.instructions if isinstance(i, Send))
    taken = {i.number for p in programs for i in p.instructions if isinstance(i, Receive)}
    assert sent.keys() == taken


def test_parameters_change_and_metrics_are_reported_once_in_a_step() -> None:
    graph = hand_on_portions(FOLLOWING, 3)
    (source,) = {average.source for average in graph.averages}
    plan = part(graph, keep=(source,))
    whole = lower_step(
        FOLLOWING,
        plan,
        home_placements(graph, plan),
        kept_copies(graph, plan, home_placements(graph, plan)),
        {},
    )
    once = (Report, Reallocate, Release)
    for program, other in zip(compile_portions(graph, plan), whole, strict=True):
        expected = [i for i in other.instructions if isinstance(i, once)]
        assert [i for i in program.instructions if isinstance(i, once)] == expected


def test_sampling_needs_devices_of_its_own() -> None:
    graph = hand_on_portions(PPO, 2)
    plan = part(graph)
    shared = replace(plan, placements={**plan.placements, graph.order[1].name: LAST[0]})
    with pytest.raises(
        UserError, match=r"goes on while .* works on its first answers, so they need different"
    ):
        compile_portions(graph, shared)
    trained = next(role for role in graph.roles if graph.trained(role))
    with pytest.raises(UserError, match=r"the gradients of .* stay in device memory"):
        compile_portions(graph, replace(plan, offload_optimizer=(trained,)))


def test_a_portion_without_its_samples_is_not_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    from realrl.program import lower as lowering

    monkeypatch.setattr(lowering._Lowering, "send", lambda *_: None)
    with pytest.raises(ProgramError, match="deadlock"):
        compile_portions(hand_on_portions(PPO, 2), part(PPO))


def test_some_graphs_cannot_hand_on_portions() -> None:
    keys = [Key("x", "int64"), Key("y", "int64"), Key("s", "float32", "one")]
    sample = Call("a.generate", "a", Kind.GENERATE, ("x",), ("y",), ("x",))
    train = Call("a.train", "a", Kind.TRAIN, ("y",), (), ("y",))
    assert find_portion_problem(DataflowGraph([sample, train], keys[:2])) is None
    score = Call("score", None, Kind.FUNCTION, ("x",), ("s",), ("x",), function="f.py:f")
    graph = DataflowGraph([sample, score, replace(train, inputs=("y", "s"))], keys)
    assert (
        find_portion_problem(graph) == "score reads no samples, so it does not know which of them have ended"
    )
    rewrite = Call("rewrite", None, Kind.FUNCTION, ("x",), ("w",), ("x",), function="f.py:f")
    graph = DataflowGraph(
        [rewrite, replace(sample, inputs=("w",), work=("w",)), train], [*keys[:2], Key("w", "int64")]
    )
    assert find_portion_problem(graph) == "a.generate needs outputs of rewrite first"
    with pytest.raises(DescriptionError, match="portions=3; it must be 1 or more, and 1 unless"):
        replace(train, portions=3)
    with pytest.raises(DescriptionError, match="portions=3"):
        replace(sample, ahead=1, portions=3)


def test_the_search_lets_sampling_overlap_and_its_bound_lets_all_calls_overlap() -> None:
    cut = hand_on_portions(PPO, 4)
    graph = overlap_sampling(cut)
    assert [call.name for call in graph.calls if call.ahead] == ["actor.generate"]
    graph = overlap_all(cut)
    assert graph.streaming is None
    # No call of a step reads what another call of the same step has produced.
    for call in graph.calls:
        for producer in producers(graph, call):
            assert producer.ahead > call.ahead
