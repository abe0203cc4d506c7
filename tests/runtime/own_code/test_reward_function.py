"""PPO whose reward is a Python function of the user's."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from realrl.algorithms.base.scoring import Scorer
from realrl.config.errors import UserCodeError, UserError
from realrl.data.order import Order
from realrl.recipe.graphs import build_graph
from realrl.recipe.load import dump_experiment, load_experiment
from realrl.runtime.train import train
from realrl.testing.ranks import Silent, run_on_ranks
from realrl.testing.shrink import SHAPE
from tests.conftest import World, read_metrics, write_jsonl
from tests.runtime.conftest import Command

CODE = """
import math

def agreement(prompts, completions, wanted, bonus=None):
    assert all(isinstance(text, str) for text in (*prompts, *completions, *wanted))
    assert bonus is None or any(value is None for value in bonus)
    for text, word, more in zip(completions, wanted, bonus or [None] * len(wanted)):
        yield sum(letter in word for letter in text) / (1 + len(text)) + (more or 0.0)

async def everything(**arguments):
    given = ["bonus", "completion_ids", "completions", "prompts", "wanted"]
    assert sorted(arguments) == given, sorted(arguments)
    assert all(isinstance(token, int) for row in arguments.pop("completion_ids") for token in row)
    return agreement(**arguments)

def raises(completions):
    return [1.0 / (len(text) - len(text)) for text in completions]

def interrupts(completions):
    raise KeyboardInterrupt

def too_few(completions):
    return [1.0] * (len(completions) - 1)

def not_a_number(completions):
    return [math.nan] * len(completions)

def nones(completions):
    return [None] * len(completions)

def texts(completions):
    return ["1.0"] * len(completions)

def huge(completions):
    return [1e300] * len(completions)

def by_position(completions, /):
    return [0.0] * len(completions)

async def waits_often(completions):
    yield 0.0

def more(completions, solution):
    return [0.0] * len(completions)
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "rewards.py"
    file.write_text(CODE)
    return file


def recipe(world: World, directory: Path, reward: str, **changes: Any) -> Path:
    """A recipe of two steps whose records have further fields, of which one is sometimes missing."""
    directory.mkdir(exist_ok=True)
    prompts = [json.loads(line) for line in (world.root / "ppo.jsonl").read_text().splitlines()]
    for number, record in enumerate(prompts):
        record |= {"wanted": "aeiou"[number % 5] * 3} | ({"bonus": 0.25} if number % 3 else {})
    data = write_jsonl(directory / "records.jsonl", prompts)
    given = {"data__train": data, "data__eval": data, "training__steps": 2, "models__reward": None}
    return world.recipe("ppo", directory, reward=reward, **{**given, **changes})


def losses(directory: Path) -> list[Mapping[str, float]]:
    return [
        {name: value for name, value in step.items() if name.endswith(("loss", "score", "kl", "grad_norm"))}
        for step in read_metrics(directory / "run")
    ]


ON_TWO = {
    "symmetric": "symmetric",
    "beside the reference": {
        "actor.generate": {"mesh": 0, "dp": 1},
        "reward.function": {"mesh": 1, "dp": 1},
        "ref.inference": {"mesh": 0, "dp": 1},
        "critic.inference": {"mesh": "0-1", "dp": 2},
        "actor.train": {"mesh": "0-1", "dp": 2},
        "critic.train": {"mesh": "0-1", "dp": 2},
    },
}


def test_one_and_two_processes_learn_the_same_from_it(world: World, tmp_path: Path, file: Path) -> None:
    alone = recipe(world, tmp_path / "alone", f"{file}:agreement")
    train(load_experiment(str(alone)), Silent())
    expected = losses(tmp_path / "alone")
    assert any(name == "actor.train/score" for name in expected[0])
    together = []
    for number, plan in enumerate(ON_TWO.values()):
        directory = tmp_path / f"two-{number}"
        directory.mkdir()
        if not isinstance(plan, str):
            (directory / "plan.yaml").write_text(yaml.safe_dump({"cluster": "1x2", "calls": plan}))
            plan = str(directory / "plan.yaml")
        together.append(recipe(world, directory, f"{file}:everything", cluster="1x2", plan=plan))
    run_on_ranks(2, together)
    for one in together:
        found = losses(one.parent)
        assert len(found) == len(expected) == 2
        for ours, theirs in zip(found, expected, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6)
        evaluated = [read_metrics(run.parent / "run", "eval") for run in (one, alone)]
        scores, same = ([step["reward.function/score"] for step in steps] for steps in evaluated)
        assert len(scores) == 2 and scores == pytest.approx(same, rel=1e-4)
    check_what_is_written(alone, together)


def check_what_is_written(alone: Path, together: list[Path]) -> None:
    """Costs have the function's own seconds and waiting for it; its slices lie in rows of hosts; the saved recipe
    loads again."""
    for one in (alone, *together):
        run = one.parent / "run"
        costs = json.loads((run / "costs.json").read_text())
        waited = {call["call"]["name"]: call["waited"] for call in costs["calls"]}
        assert [name for name, seconds in waited.items() if seconds is not None] == ["reward.function"]
        assert load_experiment(str(run / "config.yaml")) == load_experiment(str(one))
        assert [file.name for file in (run / "code").iterdir()] == ["reward.function.py"]
        assert (run / "code" / "reward.function.py").read_text() == CODE
    for one in together:
        check_overlap(json.loads((one.parent / "run" / "trace.json").read_text())["traceEvents"])


def check_overlap(trace: list[dict[str, Any]]) -> None:
    """Every rank goes on with inference once it has started the function, and collects it only afterwards."""
    names = {e["tid"]: e["args"]["name"] for e in trace if e["name"] == "thread_name"}
    slices = [e for e in trace if e["ph"] == "X" and e["args"]["step"] == 1]
    functions = [e for e in slices if e["name"].startswith("run        reward.function ")]
    assert functions and {names[e["tid"]].partition(" host")[1] for e in functions} == {" host"}
    for function in functions:
        rank = names[function["tid"]].removesuffix(" host")
        mine = sorted((e for e in slices if names[e["tid"]] == rank), key=lambda e: e["ts"])
        texts = [" ".join(e["name"].split()) for e in mine]
        received = max(i for i, text in enumerate(texts) if "reward.function <-" in text)
        infers = [i for i, text in enumerate(texts) if text.startswith("run critic.inference")]
        handed_on = next(i for i, text in enumerate(texts) if "reward.function ->" in text)
        # It is called before the rank infers, and waited for after that, so that both can be under way.
        assert received < min(infers) and max(infers) < handed_on
        assert "waiting" in mine[handed_on]["args"]
        assert function["ts"] >= mine[received]["ts"]
        assert function["ts"] + function["dur"] <= mine[handed_on]["ts"] + mine[handed_on]["dur"]


FAILURES = {
    "raises": "raised ZeroDivisionError: float division by zero (FILE:17)RECORD",
    "interrupts": "raised KeyboardInterrupt (FILE:20)RECORD",
    "too_few": "gave 15 numbers for 16 completions; it must give one each",
    "not_a_number": "gave nan for a completion; it must give one number for each of 16 completionsRECORD",
    "texts": "gave str '1.0' for a completion; it must give one number for each of 16 completionsRECORD",
    "huge": "gave 1e+300, which is too large for float32RECORD",
}


@pytest.mark.parametrize("name", FAILURES)
def test_what_a_reward_function_does_wrong_is_said(
    world: World, tmp_path: Path, file: Path, name: str
) -> None:
    written = recipe(world, tmp_path, f"{file}:{name}", data__eval=None)
    with pytest.raises(UserCodeError) as raised:
        train(load_experiment(str(written)), Silent())
    experiment = load_experiment(str(written))
    first = Order(80, experiment.data.batch, experiment.seed).indices(0)[0]
    expected = FAILURES[name].replace("FILE", str(file))
    expected = expected.replace("RECORD", f"; record {tmp_path / 'records.jsonl'}:{first + 1}")
    assert str(raised.value) == f"reward={file}:{name} {expected}"


def test_a_reward_that_applies_to_no_sample_ends_the_run(world: World, tmp_path: Path, file: Path) -> None:
    written = recipe(world, tmp_path, f"{file}:nones", data__eval=None)
    expected = f"reward.function ({file}:nones) gave None, or failed, for all 16 answers of step 1, so"
    with pytest.raises(UserCodeError, match=f"^{re.escape(expected)}"):
        train(load_experiment(str(written)), Silent())


def test_a_nested_field_that_is_asked_for_is_copied_by_data_columns() -> None:
    scorer: Any = SimpleNamespace(label="reward", required=["reward_model.ground_truth"])
    with pytest.raises(
        UserError, match=r"data\.columns={reward_model\.ground_truth: NAME} copies a nested field"
    ):
        Scorer.check_fields(scorer, "f.jsonl", {"reward_model"})


MISTAKES = {
    "nothing": "reward=FILE:nothing: FILE has no nothing",
    "math": "reward=FILE:math is not a function",
    "by_position": "reward=FILE:by_position takes completions by position only; it is called with keyword"
    " arguments",
    "waits_often": "reward=FILE:waits_often is an async generator; return a list",
    "more": "reward=FILE:more needs 'solution', which no record of RECORDS has; there are prompts, completions,"
    " bonus and wanted; data.columns={FIELD: solution} renames a field",
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_function_that_cannot_be_called_is_refused_before_models_are_loaded(
    world: World, tmp_path: Path, file: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("realrl.runtime.worker.roles.Roles.load_weights", None)
    written = recipe(world, tmp_path, f"{file}:{name}")
    with pytest.raises(UserError) as raised:
        train(load_experiment(str(written)), Silent())
    message = MISTAKES[name].replace("FILE", str(file)).replace("RECORDS", str(tmp_path / "records.jsonl"))
    assert str(raised.value) == message


@pytest.mark.parametrize(
    ("reward", "model", "message"),
    [
        ("rewards.py", None, "reward=rewards.py: write FILE.py:FUNCTION or package.module:FUNCTION"),
        ("os:abs", {"path": "x"}, "reward (a function, FILE.py:FUNCTION) and models.reward (a reward model)"
         " are both given; keep one, or add them up: a mixture with a term {model: reward}"),
        ("no/rewards.py:f", None, "reward=no/rewards.py:f: there is no file CWD/no/rewards.py"),
        ("no_module.rewards:f", None, "reward=no_module.rewards:f: there is no module"
         " no_module.rewards; write FILE.py or package.module"),
        (None, None, "reward (a function, FILE.py:FUNCTION) and models.reward (a reward model) are both missing;"
         " give one"),
    ],
)  # fmt: skip
def test_a_recipe_has_either_a_function_or_a_model(
    world: World, tmp_path: Path, reward: str | None, model: Any, message: str
) -> None:
    written = world.recipe("ppo", tmp_path, reward=reward, models__reward=model)
    with pytest.raises(UserError) as raised:
        load_experiment(str(written))
    assert str(raised.value) == message.replace("CWD", str(Path.cwd()))


def test_a_function_that_is_missing_is_named_before_a_plan_is_searched(
    world: World, tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("realrl.runtime.prepare.fit.plan_cache.cached_plan", None)
    written = recipe(world, tmp_path, f"{file}:nothing", plan="search")
    with pytest.raises(UserError, match=f"^reward={file}:nothing: {file} has no nothing$"):
        train(load_experiment(str(written)), Silent())


def test_a_saved_recipe_finds_code_of_the_user_from_any_directory(
    world: World, tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = file.with_name("family.py")
    family.write_text("from realrl.families.built_in.llama import LLAMA as FAMILY\n")
    written = recipe(
        world,
        tmp_path,
        "rewards.py:agreement",
        evaluation__judge="rewards.py:too_few",
        models__actor__family="family.py",
        models__ref={"shape": {**SHAPE, "family": "family.py"}},
    )
    monkeypatch.chdir(tmp_path)
    experiment = load_experiment(str(written))
    monkeypatch.chdir(world.root)
    saved = tmp_path / "saved.yaml"
    saved.write_text(dump_experiment(experiment))
    assert load_experiment(str(saved)) == experiment
    assert build_graph(experiment).call("reward.function").function == f"{file}:agreement"
    models = experiment.model_dump()["models"]
    assert models["actor"]["family"] == models["ref"]["shape"]["family"] == str(family)


def test_a_field_with_the_name_of_the_texts_is_refused(world: World, tmp_path: Path, file: Path) -> None:
    written = recipe(world, tmp_path, f"{file}:everything")
    write_jsonl(tmp_path / "records.jsonl", [{"prompt": "a", "completions": 1}] * 20)
    with pytest.raises(UserError, match="have a field 'completions', which is the name of an argument"):
        train(load_experiment(str(written)), Silent())


def test_the_error_of_one_rank_ends_the_run_of_all(realrl: Command, world: World, tmp_path: Path) -> None:
    file = tmp_path / "rewards.py"
    file.write_text(
        "import os\n\ndef score(completions):\n"
        "    if os.environ.get('RANK') == '1':\n        raise KeyError('mine')\n"
        "    return [0.0] * len(completions)\n"
    )
    written = recipe(world, tmp_path, f"{file}:score", cluster="1x2", data__eval=None)
    status, error = realrl("train", str(written))
    assert status == 2
    record = tmp_path / "records.jsonl"
    message = f"realrl: reward={file}:score raised KeyError: 'mine' ({file}:5); record {record}:"
    assert error.splitlines()[-1].startswith(message)
