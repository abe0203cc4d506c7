"""A judge that fails is a user's mistake, told in one error message with file and line."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from realrl.algorithms.rewards.scorers import Judge
from realrl.config.errors import UserCodeError, UserError
from realrl.config.user_code import UserFunction
from realrl.recipe.load import load_experiment
from realrl.runtime.train import train
from realrl.testing.ranks import Silent
from tests.conftest import World

CODE = """
import sys
import torch

def helper():
    return 1 / 0

def raises(completions):
    return helper()

def lazily(completions):
    for text in completions:
        yield len(text.no_such_attribute)

def leaves(completions):
    sys.exit(3)

def texts(completions):
    return ["1.0", "2.0"]

def nothing(completions):
    return None

def one_number(completions):
    return 1.0

def one_text(completions):
    return "ab"

def too_few(completions):
    return [1.0]

def not_a_number(completions):
    return [1.0, float("nan")]

def nones(completions):
    return [None, None]

def a_set(completions):
    return {1.0, 2.0}

def a_dict(completions):
    return dict.fromkeys(completions, 1.0)

def tensor(completions):
    return torch.tensor([1.0, 2.0])

def generator(completions):
    yield from (1, True)
"""

FAILURES = {
    "raises": "raised ZeroDivisionError: division by zero (FILE:6)",
    "lazily": "raised AttributeError: 'str' object has no attribute 'no_such_attribute' (FILE:13)",
    "leaves": "raised SystemExit: 3 (FILE:16)",
    "texts": "gave str '1.0' for a completion; it must give one number for each of 2 completions",
    "nothing": "gave None; it must give one number for each of 2 completions",
    "one_number": "gave 1.0; it must give one number for each of 2 completions",
    "one_text": "gave str 'ab'; it must give one number for each of 2 completions",
    "too_few": "gave 1 numbers for 2 completions; it must give one each",
    "not_a_number": "gave nan for a completion; it must give one number for each of 2 completions",
    "a_set": "gave a set, whose order is not that of the completions; it must give one number for each of 2"
    " completions, in their order",
    "a_dict": "gave a dict, whose order is not that of the completions; it must give one number for each of 2"
    " completions, in their order",
    "nones": "gave None for a completion; it must give one number for each of 2 completions",
}


def rate(reference: str) -> list[float]:
    return UserFunction("evaluation.judge", reference).numbers(2, ["a", "b"])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "judge.py"
    file.write_text(CODE)
    return file


@pytest.mark.parametrize("name", FAILURES)
def test_errors_of_a_judge_are_described(file: Path, name: str) -> None:
    with pytest.raises(UserError) as raised:
        rate(f"{file}:{name}")
    assert str(raised.value) == f"evaluation.judge={file}:{name} {FAILURES[name].replace('FILE', str(file))}"
    if "raised" not in FAILURES[name]:
        return
    assert isinstance(raised.value, UserCodeError)
    assert str(file) in raised.value.trace and "user_function.py" not in raised.value.trace


@pytest.mark.parametrize(("name", "scores"), [("tensor", [1.0, 2.0]), ("generator", [1.0, 1.0])])
def test_a_judge_may_give_any_numbers(file: Path, name: str, scores: list[float]) -> None:
    assert rate(f"{file}:{name}") == scores


def test_a_judge_that_leaves_while_it_is_imported_is_named(tmp_path: Path) -> None:
    (tmp_path / "judge.py").write_text("import sys\nsys.exit()\n")
    with pytest.raises(UserError, match=r"cannot be imported: SystemExit \(.*judge\.py:2\)"):
        rate(f"{tmp_path / 'judge.py'}:judge")


def test_a_judge_that_fails_at_the_end_loses_no_model(world: World, tmp_path: Path) -> None:
    judge = tmp_path / "judge.py"
    judge.write_text(
        "calls = []\ndef second(texts):\n    calls.append(1)\n    return [1 / (2 - len(calls))] * len(texts)\n"
    )
    recipe = world.recipe(
        "ppo",
        tmp_path,
        data__eval=str(world.root / "ppo.jsonl"),
        training__steps=1,
        evaluation__judge=f"{judge}:second",
    )
    with pytest.raises(UserCodeError) as error:
        train(load_experiment(str(recipe)), Silent())
    run = tmp_path / "run"
    saved = f"{run / 'checkpoints' / 'step-000001'}, {run / 'final'}"
    assert str(error.value).endswith(f"({judge}:4); saved: {saved}")
    assert (run / "final" / "model.safetensors").exists() and (run / "final-critic").is_dir()
    assert not (run / "summary.json").exists()


def test_a_judge_may_define_a_dataclass_with_postponed_annotations(tmp_path: Path) -> None:
    (tmp_path / "judge.py").write_text(
        "from __future__ import annotations\n"
        "from dataclasses import KW_ONLY, dataclass\n\n"
        "@dataclass\n"
        "class Scale:\n"
        "    _: KW_ONLY\n"
        "    factor: float = 2.0\n\n"
        "def judge(completions):\n"
        "    return [Scale().factor] * len(completions)\n"
    )
    assert rate(f"{tmp_path / 'judge.py'}:judge") == [2.0, 2.0]


def test_an_interruption_is_the_judges_own_unless_it_may_be_ctrl_c(tmp_path: Path) -> None:
    file = tmp_path / "judge.py"
    file.write_text("def judge(completions):\n    raise KeyboardInterrupt\n")
    # Not what it is where tests run in the background, which ignore it.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            rate(f"{file}:judge")
        signal.signal(signal.SIGINT, lambda number, frame: None)
        with pytest.raises(UserCodeError, match=r"raised KeyboardInterrupt \(.*judge\.py:2\)"):
            rate(f"{file}:judge")
    finally:
        signal.signal(signal.SIGINT, handler)


COLUMNS_CODE = """
from functools import partial

def scaled(texts, right, scale):
    return [scale * (answer == "a") + len(text) for text, answer in zip(texts, right)]

class Rates:
    def __call__(self, completions, right):
        return scaled(completions, right, 2)

async def later(completions, prompts, completion_ids):
    return [len(p) + len(i) for p, i in zip(prompts, completion_ids)]

def everything(texts, **columns):
    assert set(columns) == {"prompts", "completion_ids", "right", "other"}
    return scaled(texts, columns["right"], 3)

def by_position(completions, /, right):
    return scaled(completions, right, 4)

part = partial(scaled, scale=2)
an_object = Rates()
method = Rates().__call__
one_by_one = partial(map, len)
"""

RATED = {
    "part": [3.0, 2.0],
    "an_object": [3.0, 2.0],
    "method": [3.0, 2.0],
    "later": [3.0, 4.0],
    "everything": [4.0, 2.0],
    "by_position": [5.0, 2.0],
    "one_by_one": [1.0, 2.0],
}


@pytest.mark.parametrize("name", RATED)
def test_a_judge_takes_columns_by_name_whatever_kind_of_callable_it_is(tmp_path: Path, name: str) -> None:
    file = tmp_path / "judge.py"
    file.write_text(COLUMNS_CODE)
    judge = Judge(f"{file}:{name}")
    judge.load()
    judge.check_fields("f.jsonl", {"right", "other"})
    columns: dict[str, list[Any]] = {"right": ["a", "b"], "other": [0, 0]}
    texts: dict[str, list[Any]] = {"prompts": ["p", "pp"], "completions": ["x", "yy"]}
    texts["completion_ids"] = [[3, 1], [4, 1]]
    assert judge.rate({**columns, **texts}) == RATED[name]


@pytest.mark.parametrize("name", ["part", "an_object"])
def test_the_judge_of_a_run_sees_the_columns_of_the_evaluation_records(
    world: World, tmp_path: Path, name: str
) -> None:
    file, records = tmp_path / "judge.py", tmp_path / "eval.jsonl"
    file.write_text(
        "from functools import partial\n"
        "def rate(texts, number, scale):\n    return [scale * n for n in number]\n"
        "part = partial(rate, scale=2)\n"
        "class Rates:\n"
        "    def __call__(self, completions, number):\n        return rate(completions, number, 2)\n"
        "an_object = Rates()\n"
    )
    lines = [json.dumps({"prompt": "the film", "number": number, "unused": 1}) for number in range(5)]
    records.write_text("\n".join(lines))
    changes: dict[str, Any] = {"data__eval": str(records), "training__steps": 1, "evaluation__samples": 2}
    recipe = world.recipe("ppo", tmp_path, **changes, evaluation__judge=f"{file}:{name}")
    train(load_experiment(str(recipe)), Silent())
    first = min((tmp_path / "run" / "samples").glob("*.jsonl"))
    rows = [json.loads(line) for line in first.read_text().splitlines()]
    assert [row["judge"] for row in rows] == [0, 0, 2, 2, 4, 4, 6, 6, 8, 8]


def test_a_column_that_a_judge_needs_and_no_record_has_is_named(world: World, tmp_path: Path) -> None:
    file = tmp_path / "judge.py"
    file.write_text("def rate(texts, solution):\n    return [0] * len(texts)\n")
    recipe = world.recipe(
        "ppo", tmp_path, data__eval=str(world.root / "ppo.jsonl"), evaluation__judge=f"{file}:rate"
    )
    with pytest.raises(UserError, match=r"^evaluation\.judge=.*:rate needs 'solution', which no record of"):
        train(load_experiment(str(recipe)), Silent())
