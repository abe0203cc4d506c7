"""The samples of an evaluation say what the model sampled in each trajectory, and what its environment did."""

import json
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import yaml

from realrl.cli.monitoring.run_page import RunPage
from realrl.cli.page.trajectory import FAILED
from realrl.cli.report import read_run
from realrl.huggingface.tokenizers import load_tokenizer
from realrl.testing.ranks import run_on_ranks, sampled
from tests.conftest import World, write_jsonl

GAME = """
class Game:
    def reset(self, number):
        if number == 2:
            raise ValueError("no such game")
        self.number, self.left = number, number + 1
        return " begin"

    def step(self, text):
        self.left -= 1
        return f" {self.left} left.", 0.5 if self.left else 0.0, not self.left
"""
EVALUATION = 1 << 40
"""Step under which `sampled` has the sequences of evaluations."""


@pytest.fixture(scope="module")
def recipe(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe that has run, with evaluations on four prompts. The environment of the third one fails."""
    directory = tmp_path_factory.mktemp("shown")
    (directory / "game.py").write_text(GAME)
    (directory / "judge.py").write_text(
        "def rate(completions): return [float(len(t)) for t in completions]\n"
    )
    records = [{"prompt": "the film", "number": number} for number in (0, 1, 2, 3)]
    settings: dict[str, Any] = {
        "data__train": write_jsonl(directory / "train.jsonl", [records[i] for i in (0, 1, 3)] * 2),
        "data__eval": write_jsonl(directory / "eval.jsonl", records),
        "data__batch": 4,
        "training__steps": 1,
        "policy": {"samples": 2, "minibatches": 1},
        "generation": {"max_new_tokens": 100, "stop": ["e"]},
        "evaluation": {"shown": 4, "judge": f"{directory / 'judge.py'}:rate"},
        "environment": {"factory": f"{directory / 'game.py'}:Game", "max_turn_tokens": 5, "on_error": "skip"},
    }
    file = world.recipe("grpo", directory, **settings)
    document = yaml.safe_load(file.read_text())
    del document["models"]["reward"]
    file.write_text(yaml.safe_dump(document))
    run_on_ranks(1, [file])
    return file


@pytest.fixture
def rows(recipe: Path) -> list[dict[str, Any]]:
    """Rows of the first evaluation."""
    file = recipe.parent / "run" / "samples" / "step-000000.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_parts_are_the_runs_of_sampled_and_of_other_tokens(
    world: World, recipe: Path, rows: list[dict[str, Any]]
) -> None:
    tokens, tokenizer = sampled(recipe), load_tokenizer(world.tokenizer)
    for i, row in enumerate(rows):
        name = f"{EVALUATION}/{i}"
        ids, mask, prompt = (tokens[key][0] for key in (name, f"{name} mask", f"{name} prompt"))
        pairs = [*zip(ids, mask, strict=True)][prompt[0] :]
        runs = [(by, [token for token, _ in run]) for by, run in groupby(pairs, key=lambda pair: pair[1])]
        expected = [(tokenizer.decode(run), len(run), by == 1) for by, run in runs]
        assert [(part["text"], part["tokens"], part["sampled"]) for part in row["trajectory"]] == expected


def test_rewards_turns_and_failures_are_those_of_the_game(rows: list[dict[str, Any]]) -> None:
    assert [row["environment_failed"] for row in rows] == [False, False, True, False]
    failed = rows.pop(2)
    assert (failed["turns"], failed["environment_reward"], failed["score"]) == (0, None, None)
    assert not any(part["sampled"] for part in failed["trajectory"])
    assert [row["turns"] for row in rows] == [1, 2, 4] and {row["failed_calls"] for row in rows} == {0}
    for row in rows:
        turns = [part.get("reward", 0.0) for part in row["trajectory"] if part["sampled"]]
        assert turns == [0.5] * (row["turns"] - 1) + [0.0]
        assert row["environment_reward"] == row["score"] == sum(turns)
        written = [part["text"] for part in row["trajectory"] if not part["sampled"]]
        assert written == [" begin", *(f" {left} left." for left in range(row["turns"] - 1, 0, -1))]


def test_the_completion_is_the_last_turn_as_functions_and_judges_see_it(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        last = [part["text"] for part in row["trajectory"] if part["sampled"]][-1:] or [""]
        assert row["completion"] == last[0].partition("</s>")[0].partition("e")[0]
        assert row["judge"] == len(row["completion"])


def test_page_and_report_show_the_trajectories(recipe: Path, rows: list[dict[str, Any]]) -> None:
    run = recipe.parent / "run"
    found = json.loads(RunPage(run).read_samples({"step": "0"}).content)
    assert [sample["failed"] for sample in found] == ["", "", FAILED, ""]
    for sample, row in zip(found, rows, strict=True):
        shown = [(part["text"], part["sampled"], part["reward"]) for part in sample["parts"]]
        assert shown == [(part["text"], part["sampled"], part.get("reward")) for part in row["trajectory"]]
        assert sample["numbers"]["turns"] == row["turns"] and "failed_calls" in sample["numbers"]
    first = read_run(str(run)).samples[0]
    assert [len(sample["parts"]) for sample in first] == [len(row["trajectory"]) for row in rows]
    assert [sample["failed"] for sample in first] == [False, False, True, False]
