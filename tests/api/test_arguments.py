"""Keyword arguments of the Python API become the settings of a recipe."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pandas
import pytest
import yaml
from datasets import Dataset, DatasetDict

import realrl
from realrl.api.arguments import read_arguments
from realrl.cli.app import run_app
from realrl.recipe.registry import find_algorithm, list_algorithms
from tests.config.minimal import least

WEIGHTED = [{"source": "a.jsonl", "weight": 2.0}]
ROWS = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "1+2=", "answer": "3"}]


def read(algorithm: str, **arguments: Any) -> dict[str, Any]:
    return read_arguments(find_algorithm(algorithm)[0], algorithm, arguments)


def at(settings: Any, path: str) -> Any:
    for part in path.split("."):
        settings = settings[part]
    return settings


@pytest.mark.parametrize(
    ("algorithm", "arguments", "path", "value"),
    [
        ("grpo", {"model": "Qwen/Qwen3-0.6B"}, "models.actor.path", "Qwen/Qwen3-0.6B"),
        ("reward", {"model": Path("m")}, "models.reward.path", "m"),
        ("ppo", {"reward_model": "r"}, "models.reward.path", "r"),
        ("ppo", {"critic": {"path": "c"}}, "models.critic.path", "c"),
        ("distillation", {"teacher": "t"}, "models.teacher.path", "t"),
        ("grpo", {"samples": 4}, "policy.samples", 4),
        ("grpo", {"num_generations": 4}, "policy.samples", 4),
        ("grpo", {"kl": {"coef": 0}}, "policy.kl.coef", 0),
        ("grpo", {"beta": 0.1}, "policy.kl.coef", 0.1),
        ("ppo", {"lam": 0.9}, "ppo.lam", 0.9),
        ("dpo", {"loss_type": "ipo"}, "preference.loss", "ipo"),
        ("grpo", {"learning_rate": 1e-6}, "models.actor.optimizer.lr", 1e-6),
        ("ppo", {"lr": 1e-6}, "models.actor.optimizer.lr", 1e-6),
        ("grpo", {"lora": {"rank": 8}}, "models.actor.lora.rank", 8),
        ("grpo", {"max_new_tokens": 64}, "generation.max_new_tokens", 64),
        ("grpo", {"batch": 64}, "data.batch", 64),
        ("grpo", {"steps": 100}, "training.steps", 100),
        ("grpo", {"data.batch": 8}, "data.batch", 8),
        ("grpo", {"generation": {"top_k": 5}}, "generation.top_k", 5),
        ("grpo", {"seed": 3}, "seed", 3),
        ("grpo", {"data": "openai/gsm8k"}, "data.train", "openai/gsm8k"),
        ("grpo", {"data": ["a.jsonl", "b.jsonl"]}, "data.train", ["a.jsonl", "b.jsonl"]),
        ("grpo", {"data": {"a.jsonl": 1.0, "b.jsonl": 0.5}}, "data.train", {"a.jsonl": 1.0, "b.jsonl": 0.5}),
        ("grpo", {"data": {"train": "a.jsonl", "batch": 8}}, "data.batch", 8),
        (
            "grpo",
            {"data": [{"source": "a.jsonl", "weight": 2.0}]},
            "data.train",
            [{"source": "a.jsonl", "weight": 2.0}],
        ),
        ("grpo", {"reward": "rewards.py:score"}, "reward", "rewards.py:score"),
        ("grpo", {"reward": ["rewards.py:score", len]}, "reward.score.function", "rewards.py:score"),
        ("grpo", {"reward": {"verifier": {"kind": "numeric"}}}, "reward", {"verifier": {"kind": "numeric"}}),
    ],
)
def test_an_argument_is_a_setting(algorithm: str, arguments: dict[str, Any], path: str, value: Any) -> None:
    assert at(read(algorithm, **arguments), path) == value


@pytest.mark.parametrize(
    ("algorithm", "arguments", "message"),
    [
        ("grpo", {"sample": 4}, "grpo has no argument sample; did you mean samples?"),
        ("grpo", {"xyzzy": 4}, "grpo has no argument xyzzy; `realrl config grpo --all` lists its settings"),
        ("sft", {"data": {"test": ROWS}}, "data: the splits are test; one must be train"),
        ("sft", {"data": [{"prompt": object()}]}, "data: record 1 cannot be written as JSON: "),
        ("grpo", {"reward": [len, len]}, "reward: two functions have the same name"),
        (
            "grpo",
            {"environment_factory": {"a": dict, "b": list}},
            "environment: several environments are not supp",
        ),
    ],
)
def test_a_wrong_argument_is_one_message(algorithm: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(realrl.UserError) as caught:
        read(algorithm, **arguments)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    "data",
    [
        ROWS,
        tuple(ROWS),
        Dataset.from_list(ROWS),
        pandas.DataFrame(ROWS),
        DatasetDict(train=Dataset.from_list(ROWS)),
    ],
    ids=["list", "tuple", "dataset", "frame", "splits"],
)
def test_records_in_memory_become_the_same_file(data: Any) -> None:
    file = Path(at(read("grpo", data=data), "data.train"))
    assert [json.loads(line) for line in file.read_text().splitlines()] == ROWS
    assert str(file) == at(read("grpo", data=ROWS), "data.train")


def test_splits_give_records_for_evaluation() -> None:
    splits = DatasetDict(train=Dataset.from_list(ROWS), test=Dataset.from_list(ROWS[:1]))
    data = read("grpo", data=splits)["data"]
    assert Path(data["eval"]).read_text().count("\n") == 1


def score(completions: list[str], **_: Any) -> list[float]:
    return [len(text) for text in completions]


class Scorer:
    def __call__(self, completions: list[str], **_: Any) -> list[float]:
        return score(completions)


def test_functions_have_names_that_stay_the_same_in_the_next_process() -> None:
    names = [
        read("grpo", reward=function)["reward"]
        for function in (score, Scorer(), partial(score, 1), partial(score, 2))
    ]
    again = [
        read("grpo", reward=function)["reward"]
        for function in (score, Scorer(), partial(score, 1), partial(score, 2))
    ]
    assert names == again and len(set(names)) == 4
    assert all(name.startswith("realrl_objects:") for name in names)


def test_several_functions_are_a_mixture_with_weights() -> None:
    reward = read("grpo", reward={"length": (score, 0.5), "object": Scorer()})["reward"]
    assert reward["length"]["weight"] == 0.5 and reward["object"]["function"].startswith(
        "realrl_objects:Scorer_"
    )
    assert set(read("grpo", reward=[score, Scorer()])["reward"]) == {"score", "Scorer"}


def test_every_algorithm_has_a_class_that_python_lists() -> None:
    names = dir(realrl)
    for algorithm in list_algorithms():
        cls = realrl.algorithm(algorithm)
        assert cls.__name__ in names and getattr(realrl, cls.__name__) is cls
        assert cls.__doc__ == find_algorithm(algorithm)[0].about
    with pytest.raises(AttributeError, match="module 'realrl' has no attribute 'Absent'"):
        _ = realrl.Absent


def test_a_recipe_in_python_is_that_of_the_file() -> None:
    from realrl.recipe.load import dump_experiment, parse_experiment

    settings = least("grpo")
    recipe = realrl.GRPO(**{name: value for name, value in settings.items() if name != "algorithm"}).recipe()
    assert recipe == dump_experiment(parse_experiment(settings))


def test_a_plan_for_gpus_predicts_what_the_command_predicts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also with `dtype: auto`, which differs between this machine's CPUs and the GPUs."""
    settings = {"data": {"train": "a.jsonl", "batch": 8}, "run_dir": "runs/x"}
    models = {"actor": {"shape": "qwen3-0.6b"}}
    file = tmp_path / "recipe.yaml"
    file.write_text(json.dumps({"algorithm": "sft", "models": models, **settings}))
    assert run_app(["plan", str(file), "--cluster", "h100:1x2", "--effort", "2000", "--json"]) == 0
    expected = json.loads(capsys.readouterr().out)["step_seconds"]
    planned = realrl.SFT(model=models["actor"], **settings).plan("h100:1x2", effort=2000)
    assert planned.report.chosen.step_seconds == pytest.approx(expected)


def test_own_file_is_an_algorithm_with_its_settings_by_name(tmp_path: Path) -> None:
    """`beta` is also a name of another tool, but this algorithm has a setting of this name."""
    example = Path(__file__).parents[2] / "examples" / "online_dpo.py"
    cls = realrl.algorithm(str(example))
    made = cls(
        model={"shape": "qwen3-0.6b", "tokenizer": "t"},
        data="x.jsonl",
        reward={"verifier": {"kind": "numeric"}},
        beta=0.7,
    )
    settings = yaml.safe_load(made.recipe())
    assert settings["algorithm"] == str(example)
    assert settings["online_dpo"]["beta"] == 0.7


def test_two_names_of_a_setting_are_refused() -> None:
    with pytest.raises(realrl.UserError, match="samples and num_generations are the same setting"):
        realrl.GRPO("x", data="x.jsonl", samples=4, num_generations=8)
    with pytest.raises(realrl.UserError, match="seed belongs to the model"):
        realrl.Sampling(seed=1)
