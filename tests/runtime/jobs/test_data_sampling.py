"""`realrl generate` over data sets: scored answers, the best of several, on one and two processes."""

import json
from pathlib import Path
from typing import Any

import pytest

from realrl.cli.app import run_app
from realrl.runtime.evaluation.answers import Answer
from realrl.runtime.evaluation.generate import choose_best
from tests.conftest import World, write_jsonl
from tests.runtime.conftest import Command

REWARD = """
def closeness(prompts, completions, wanted):
    return [-abs(len(text) - length) for text, length in zip(completions, wanted, strict=True)]
"""


def read_rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.fixture(scope="module")
def place(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a reward and records, and with four scored answers to each of them in `all.jsonl`."""
    place = tmp_path_factory.mktemp("sampling")
    (place / "reward.py").write_text(REWARD)
    records = [{"prompt": f"the {noun}", "wanted": 5 * i} for i, noun in enumerate(("film", "cast", "plot"))]
    write_jsonl(place / "records.jsonl", records)
    assert run_app([*command(world, place, "all.jsonl")]) == 0
    return place


def command(world: World, place: Path, out: str, *more: str) -> list[str]:
    data = ["--data", str(place / "records.jsonl"), "--max-new-tokens", "12", "--n", "4"]
    reward = ["--reward", f"{place / 'reward.py'}:closeness"]
    return ["generate", world.actor, *data, *reward, *more, "--out", str(place / out)]


def test_answers_to_a_data_set_are_scored_with_the_fields_of_its_records(place: Path) -> None:
    rows = read_rows(place / "all.jsonl")
    assert [row["prompt"] for row in rows] == [
        f"the {noun}" for noun in ("film", "cast", "plot") for _ in range(4)
    ]
    for i, row in enumerate(rows):
        assert row["score"] == -abs(len(row["completion"]) - 5 * (i // 4))
        assert row.keys() == {"prompt", "completion", "tokens", "finished", "score", "wanted"}


def test_two_processes_keep_the_best_answers_of_one(realrl: Command, world: World, place: Path) -> None:
    plan = place / "plan.yaml"
    plan.write_text(
        "cluster: 1x2\ncalls:\n  actor.generate: {mesh: 0-1, dp: 1, tp: 2}\n  reward.function: {mesh: 1, dp: 1}\n"
    )
    more = ("--best", "--cluster", "1x2", "--plan", str(plan))
    status, error = realrl(*command(world, place, "best.jsonl", *more))
    assert status == 0, error
    rows = read_rows(place / "all.jsonl")
    groups = [rows[i : i + 4] for i in range(0, len(rows), 4)]
    assert read_rows(place / "best.jsonl") == [max(group, key=lambda row: row["score"]) for group in groups]


def test_a_reward_model_or_a_verifier_scores_answers(world: World, place: Path) -> None:
    rows = []
    for option in (["--reward-model", world.reward], ["--reward", "{verifier: {kind: regex, pattern: e}}"]):
        out = place / "scored.jsonl"
        told = [
            "--prompt",
            "the film",
            "--n",
            "3",
            "--max-new-tokens",
            "12",
            "--out",
            str(out),
            "--overwrite",
        ]
        assert run_app(["generate", world.actor, *told, *option]) == 0
        rows.append(read_rows(out))
    assert [row["completion"] for row in rows[0]] == [row["completion"] for row in rows[1]]
    assert len({row["score"] for row in rows[0]}) == 3
    assert [row["score"] for row in rows[1]] == [float("e" in row["completion"]) for row in rows[1]]


def test_answers_without_a_score_are_chosen_last() -> None:
    answers = [
        Answer(prompt="", completion=str(i), tokens=[], finished=True, values={"score": score})
        for i, score in enumerate((float("nan"), -3.0, -2.0, -2.0, float("nan")))
    ]
    assert choose_best(answers).completion == "2"
    assert choose_best(answers[:1]).completion == "0"
