import math
from collections import Counter
from dataclasses import replace

import pytest

from realrl.algorithms.policy import make_eval_graph
from realrl.dataflow.call import Call, Candidates, Key, Kind
from realrl.dataflow.graph import DataflowGraph, format_graph, share_steps

KEYS = (
    Key("prompts", "int64"),
    Key("sequences", "int64"),
    Key("logprobs", "float32", "sequences"),
    Key("weights", "float32", "logprobs"),
    Key("score", "float32", "one"),
)
TRAIN = Call("actor.train", "actor", Kind.TRAIN, ("sequences", "score"), work=("sequences",))
SCORE = Call("reward.inference", "reward", Kind.INFERENCE, ("sequences",), ("score",), work=("sequences",))
GENERATE = Call(
    "actor.generate", "actor", Kind.GENERATE, ("prompts",), ("sequences", "logprobs"), work=("prompts",)
)
GRAPH = DataflowGraph([TRAIN, SCORE, GENERATE], KEYS)


def test_order_follows_the_data_whatever_the_order_of_declaration() -> None:
    assert [call.name for call in GRAPH.order] == ["actor.generate", "reward.inference", "actor.train"]


def test_among_ready_calls_the_first_declared_runs_first() -> None:
    calls = [Call(name, name, Kind.INFERENCE, ("prompts",), work=("prompts",)) for name in "cab"]
    assert [call.name for call in DataflowGraph(calls, KEYS).order] == ["c", "a", "b"]


def test_a_role_is_trained_after_every_other_use_of_it() -> None:
    train = Call("m.train", "m", Kind.TRAIN, ("prompts",), work=("prompts",))
    use = Call("m.inference", "m", Kind.INFERENCE, ("prompts",), work=("prompts",))
    graph = DataflowGraph([train, use], KEYS)
    assert graph.order == (use, train)
    assert graph.dependencies(train) == (use,)


def test_sources_roles_and_training_follow_from_the_calls() -> None:
    assert GRAPH.sources == ("prompts",)
    assert set(GRAPH.roles) == {"actor", "reward"}
    assert GRAPH.trained("actor") and not GRAPH.trained("reward")
    assert GRAPH.role_calls("actor") == (GENERATE, TRAIN)


@pytest.mark.parametrize(
    ("key", "own"),
    [("sequences", "sequences"), ("logprobs", "sequences"), ("weights", "sequences"), ("score", None)],
)
def test_the_lengths_of_a_key_are_those_of_the_key_it_follows(key: str, own: str | None) -> None:
    assert GRAPH.length_key(key) == own


def _inference(name: str, inputs: str, outputs: str) -> Call:
    return Call(name, name, Kind.INFERENCE, (inputs,), (outputs,), work=(inputs,))


@pytest.mark.parametrize(
    ("calls", "keys", "message"),
    [
        ([SCORE, SCORE], KEYS, "two calls have the same name"),
        ([SCORE], KEYS[:2], "uses key 'score', which is not declared"),
        (
            [_inference("a", "prompts", "score"), _inference("b", "prompts", "score")],
            KEYS,
            "produced by a and b",
        ),
        ([_inference("a", "score", "logprobs"), _inference("b", "logprobs", "score")], KEYS, "in a circle"),
        ([GENERATE], (*KEYS[:2], Key("logprobs", "float32", "nothing")), "length of unknown key 'nothing'"),
    ],
)
def test_an_impossible_graph_is_refused(calls: list[Call], keys: tuple[Key, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataflowGraph(calls, keys)


def test_a_call_must_say_which_of_its_inputs_are_work() -> None:
    with pytest.raises(ValueError, match="must name some of its inputs"):
        Call("a", "a", Kind.INFERENCE, ("prompts",), work=("sequences",))


def test_only_training_has_minibatches() -> None:
    with pytest.raises(ValueError, match="only training has mini-batches"):
        Call("a", "a", Kind.INFERENCE, ("prompts",), work=("prompts",), minibatches=2)


LIKELIEST = Call(
    "teacher.inference",
    "teacher",
    Kind.INFERENCE,
    ("prompts",),
    ("ids",),
    work=("prompts",),
    candidates=Candidates(3),
)
LEARN = Call(
    "actor.train",
    "actor",
    Kind.TRAIN,
    ("prompts", "ids"),
    work=("prompts",),
    candidates=Candidates(3, "ids"),
)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (Key("ids", "float32", "prompts", 3), "key 'ids' must have 3 whole numbers at each position"),
        (Key("ids", "int32", "prompts"), "key 'ids' must have 3 whole numbers at each position"),
        (Key("ids", "int32", "own", 3), "'ids' has other lengths than 'prompts'"),
        (Key("ids", "int32", "prompts", 0), "width=0 is below 1"),
    ],
)
def test_candidates_are_as_many_whole_numbers_beside_each_token(ids: Key, message: str) -> None:
    DataflowGraph([LIKELIEST, LEARN], (KEYS[0], Key("ids", "int32", "prompts", 3)))
    with pytest.raises(ValueError, match=message):
        DataflowGraph([LIKELIEST, LEARN], (KEYS[0], ids))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"candidates": Candidates(3)}, "training needs a key with the ids"),
        ({"candidates": Candidates(3, "other")}, "candidates are 'other', which is not among its inputs"),
        ({"candidates": Candidates(0, "ids")}, "0 candidates; it needs at least one"),
        ({"work": ("prompts", "ids")}, "one key as work"),
        ({"kind": Kind.GENERATE}, "only inference and training have candidates"),
    ],
)
def test_impossible_candidates_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(LEARN, **changes)


def test_text_names_every_call_with_where_its_inputs_come_from() -> None:
    text = format_graph(GRAPH, ["actor"])
    assert text.index("1. actor.generate") < text.index("2. reward.inference") < text.index("3. actor.train")
    assert "data set -> prompts" in text
    assert "score  <- reward.inference" in text
    assert "frozen role reward" in text


def test_text_of_an_evaluation_calls_a_role_frozen_only_where_training_does_not_train_it() -> None:
    text = format_graph(make_eval_graph(), ["actor", "critic"])
    assert "generate, role actor" in text and "inference, frozen role reward" in text


REWARD = Call(
    "reward.function",
    None,
    Kind.FUNCTION,
    ("sequences",),
    ("score",),
    work=("sequences",),
    function="reward.py:score",
    record_fields=True,
)


def test_a_function_has_edges_of_data_and_no_role() -> None:
    graph = DataflowGraph([TRAIN, REWARD, GENERATE], KEYS)
    assert graph.order == (GENERATE, REWARD, TRAIN)
    assert graph.roles == ("actor",) and graph.functions == (REWARD,)
    assert graph.role_calls("actor") == (GENERATE, TRAIN)
    assert REWARD in graph.dependencies(TRAIN) and graph.dependencies(REWARD) == (GENERATE,)
    text = format_graph(graph, ["actor"])
    assert "2. reward.function  (function reward.py:score on the host)" in text
    assert "other fields of the records  <- data set" in text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"role": "reward"}, "a function has no role, every other call has one"),
        ({"function": None}, "a function has a reference, no other call has one"),
        ({"kind": Kind.INFERENCE}, "a function has no role, every other call has one"),
        ({"kind": Kind.INFERENCE, "role": "r"}, "a function has a reference, no other call has one"),
        (
            {"kind": Kind.INFERENCE, "role": "r", "function": None},
            "only functions and environments of generation see the fields",
        ),
        ({"minibatches": 2}, "only training has mini-batches"),
    ],
)
def test_a_call_is_either_a_function_or_has_a_role(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(REWARD, **changes)


@pytest.mark.parametrize("periods", [(), (1,), (4,), (1, 3), (2, 4), (2, 3), (4, 6, 9)])
def test_shares_of_steps_are_those_of_a_count(periods: tuple[int, ...]) -> None:
    whole = math.lcm(*periods)
    counted = Counter(frozenset(p for p in periods if step % p == 0) for step in range(whole))
    shares = share_steps(frozenset(periods))
    assert shares == pytest.approx({due: count / whole for due, count in counted.items()})
