"""Runs whose steps taught nothing say so, and why."""

import json
from pathlib import Path
from typing import Any

import pytest

from realrl.cli.app import run_app
from realrl.runtime.output.untaught import UntaughtSteps, find_untaught
from tests.conftest import World, read_metrics
from tests.runtime.conftest import Command

ONE_OF_FOUR = "def one(completions):\n    return [1.0, *[None] * 3] * (len(completions) // 4)\n"
EQUAL = "def equal(completions):\n    return [0.5] * len(completions)\n"
LENGTH = "def length(completion_ids):\n    return [len(ids) for ids in completion_ids]\n"


@pytest.mark.parametrize(
    ("algorithm", "code", "changes", "reason"),
    [
        ("grpo", EQUAL, {}, "the answers to each prompt had equal rewards"),
        (
            "grpo",
            ONE_OF_FOUR,
            {},
            "the answers to each prompt had equal rewards (75 % of the answers had no score)",
        ),
        (
            "grpo",
            LENGTH,
            {"policy__mask_truncated": True, "generation": {"max_new_tokens": 1, "min_new_tokens": 1}},
            "all answers were cut off, and mask_truncated leaves them out",
        ),
        (
            "reinforce_pp",
            LENGTH,
            {"data__batch": 1, "policy__samples": 1, "policy__minibatches": 1},
            "no answer was better or worse than its baseline",
        ),
    ],
    ids=["equal rewards", "one scored answer", "cut off", "one sample"],
)
def test_a_run_that_learnt_nothing_says_so(
    world: World,
    tmp_path: Path,
    realrl: Command,
    algorithm: str,
    code: str,
    changes: dict[str, Any],
    reason: str,
) -> None:
    (tmp_path / "r.py").write_text(code)
    function = code.partition("(")[0].removeprefix("def ")
    settings = {
        "models": {"actor": {"path": world.actor, "optimizer": {"lr": 1e-3}}},
        "reward": f"{tmp_path}/r.py:{function}",
        "policy": {"samples": 4, "minibatches": 1, "kl": {"coef": 0.0, "place": "loss", "estimator": "k3"}},
        "training": {"steps": 2},
        **changes,
    }
    status, said = realrl("train", str(world.recipe(algorithm, tmp_path, **settings)))
    assert status == 0
    run = tmp_path / "run"
    assert f"note: step 1 taught the actor nothing: {reason}" in said
    assert f"note: 2 of 2 steps taught the actor nothing: {reason}" in said
    assert json.loads((run / "summary.json").read_text())["untaught_steps"] == {"actor.train": 2}
    assert all(not step.get("actor.train/grad_norm") for step in read_metrics(run))


def test_a_run_that_learns_says_nothing_of_it(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_app(["train", str(world.recipe("sft", tmp_path, training={"steps": 2}))]) == 0
    assert "taught" not in capsys.readouterr().err
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["untaught_steps"] == {}


def test_only_a_gradient_of_exactly_zero_taught_nothing() -> None:
    def found(**metrics: float | None) -> list[str]:
        return list(
            find_untaught({f"actor.train/{k}": v for k, v in {"learning_rate": 0.1, **metrics}.items()})
        )

    assert found(grad_norm=0.0) == found(empty_steps=2.0) == ["actor.train"]
    assert found(grad_norm=0.0, empty_steps=1.0) == ["actor.train"]
    assert not found(grad_norm=1e-30) and not found(grad_norm=1.0, empty_steps=1.0)
    assert not found(grad_norm=None) and not found(skipped_steps=1.0) and not found(early_stopped=1.0)


def test_counts_outlast_a_resume_and_notes_grow_rare() -> None:
    metrics = {"actor.train/learning_rate": 0.1, "actor.train/grad_norm": 0.0}
    first, second = UntaughtSteps(), UntaughtSteps()
    said = [len(list(first.take(metrics))) for _ in range(3)]
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    said += [len(list(second.take(metrics))) for _ in range(5)]
    assert said == [1, 1, 0, 1, 0, 0, 0, 1]
    assert list(second.describe("9")) == ["8 of 9 steps taught the actor nothing: the gradient was 0"]
