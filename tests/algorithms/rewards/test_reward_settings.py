"""Rewards in recipes: their forms, and contradictions."""

from pathlib import Path
from typing import Any

import pytest

from realrl.algorithms.rewards.config import RewardTerm
from realrl.config.errors import UserError
from realrl.recipe.graphs import build_eval_graph, build_graph
from realrl.recipe.load import dump_experiment, load_experiment, parse_experiment
from tests.conftest import World

EXACT = {"verifier": {"kind": "exact_match"}}


def load(world: World, directory: Path, reward: Any, algorithm: str = "grpo", **changes: Any) -> Any:
    given = (
        {"models__reward": None, "policy": {"samples": 2}}
        if algorithm == "grpo"
        else {"models__reward": None}
    )
    return load_experiment(str(world.recipe(algorithm, directory, reward=reward, **{**given, **changes})))


FORMS = {
    "function": "os:getcwd",
    "term": {**EXACT, "on_error": "skip", "timeout": None},
    "mixture": {
        "right": {**EXACT, "weight": 2.0},
        "short": "os:getcwd",
        "judge": {"http": {"url": "http://localhost:1/"}, "weight": 0.5},
        "equal": {"verifier": {"kind": "math", "answer": "solution", "extract": "boxed"}, "weight": 0.1},
        "schema": {"verifier": {"kind": "json_schema", "json_schema": {"type": "object"}}, "weight": 0},
    },
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_saved_and_read_back(world: World, tmp_path: Path, form: str) -> None:
    experiment = load(world, tmp_path, FORMS[form])
    saved = tmp_path / "saved.yaml"
    saved.write_text(dump_experiment(experiment))
    assert load_experiment(str(saved)) == experiment
    assert all(isinstance(term, RewardTerm) for term in experiment.reward.values())


def test_every_term_is_a_call_and_a_sum_adds_them_up(world: World, tmp_path: Path) -> None:
    model = {"path": world.reward}
    for algorithm in ("ppo", "remax"):
        data = str(world.root / "ppo.jsonl")
        reward = {**FORMS["mixture"], "quality": {"model": "reward"}}
        changes: dict[str, Any] = {"models__reward": model, "data__eval": data}
        experiment = load(world, tmp_path, reward, algorithm, **changes)
        names = [call.name for call in build_graph(experiment).calls if "actor" not in call.name]
        terms = [
            "equal.function",
            "right.function",
            "short.function",
            "judge.function",
            "schema.function",
            "quality.inference",
        ]
        assert sorted(names[:6]) == sorted(terms) and names[6] == "reward.sum"
        if algorithm == "remax":
            assert sorted(names[7:14]) == sorted(f"{name}_greedy" for name in (*terms, "reward.sum"))
        evaluation = build_eval_graph(experiment)
        assert evaluation is not None and evaluation.producer("score").name == "reward.sum"


MISTAKES = [
    ({}, "{} is not a reward; give FILE.py:FUNCTION"),
    (3, "reward: 3 is not a reward; give FILE.py:FUNCTION"),
    ({"a": 3}, "reward: a: 3 is not a reward; give FILE.py:FUNCTION or a section of keys"),
    ({"weight": 1.0}, "reward: a reward is one of function, verifier, http, model, environment; none is given"),
    ({**EXACT, "function": "os:abs"}, "reward: a reward is one of function, verifier, http, model, environment;"
     " function and verifier are given"),
    ({**EXACT, "wieght": 1.0}, "reward: wieght: unknown key; did you mean weight?"),
    ({"a": {**EXACT, "wieght": 1.0}}, "reward: a.wieght: unknown key; did you mean weight?"),
    ({"a": "no_module:f"}, "reward: a=no_module:f: there is no module no_module"),
    ({"a b": EXACT}, "reward: 'a b' is not a name of a term"),
    ({"actor": EXACT}, "reward: actor is the name of a role; choose another for the term"),
    ({"a": {"model": "reward"}}, "reward.a.model: reward needs models.reward"),
    ({"model": "critic"}, "reward: model: 'critic' is not 'reward'"),
    ({"model": "reward", "on_error": "skip"}, "on_error is not for a reward model"),
    ({"a": {**EXACT, "weight": 0}}, "reward: all weights are 0; at least one term must count"),
    ({**EXACT, "timeout": 0}, "reward: timeout: 0 must be above 0"),
    ({"verifier": {"kind": "exact"}}, "reward: verifier: kind='exact' is unknown; did you mean exact_match?"),
    ({"verifier": {}}, "reward: verifier: kind is missing; give exact_match, numeric, math, regex, json_schema or"),
    ({"verifier": {"kind": "regex", "pattern": "("}}, "verifier: regex: pattern: '(' is not a regular expression"),
    ({"verifier": {"kind": "numeric", "tolerance": 1}}, "verifier: numeric: tolerance: unknown key"),
    ({"http": {"url": "localhost"}}, "reward: http: url=localhost: write http://HOST:PORT/PATH, or https"),
    ({"http": {"url": "http://h/", "kind": "chat"}}, "reward: http: kind=chat needs model"),
    ({"http": {"url": "http://h/", "model": "m"}}, "reward: http: model is for kind=chat"),
]  # fmt: skip


@pytest.mark.parametrize(("reward", "message"), MISTAKES)
def test_a_mistake_is_one_message(world: World, tmp_path: Path, reward: Any, message: str) -> None:
    with pytest.raises(UserError) as raised:
        load(world, tmp_path, reward)
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_terms_can_be_overridden_one_by_one(world: World, tmp_path: Path) -> None:
    written = world.recipe(
        "grpo", tmp_path, reward={"right": EXACT, "short": "os:getcwd"}, models__reward=None
    )
    overrides = ["reward.right.weight=3.0", "reward.short={function: 'os:abs'}"]
    experiment: Any = load_experiment(str(written), overrides)
    assert experiment.reward["right"].weight == 3 and experiment.reward["short"].function == "os:abs"
    assert parse_experiment(experiment.model_dump(mode="json")) == experiment
