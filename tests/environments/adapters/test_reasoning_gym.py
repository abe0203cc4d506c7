"""Tasks of Reasoning Gym, in the class of docs/environments.md."""

from pathlib import Path

import pytest

pytest.importorskip("reasoning_gym")

import reasoning_gym

from tests.environments.adapters.playing import play, save


@pytest.mark.parametrize("seed", [5, 4_000_000_005])
def test_the_package_scores_the_only_turn(tmp_path: Path, seed: int) -> None:
    factory = save(tmp_path, "Sums")
    tasks = reasoning_gym.create_dataset("chain_sum", seed=1, size=100_000)
    task = tasks[seed % 100_000]
    replies, reward = play(factory, {"seed": seed}, f"So <answer>{task['answer']}</answer>")
    assert replies[0].observation == task["question"] and replies[1].done and reward == 1.0
    wrong = f"<answer>{int(task['answer']) + 1}</answer>"
    assert play(factory, {"seed": seed}, wrong)[1] == tasks.score_answer(wrong[8:-9], task) < 1
    assert play(factory, {"seed": seed}, "I do not know.")[1] == 0.0
