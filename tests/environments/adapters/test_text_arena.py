"""A game of TextArena, in the class of docs/environments.md."""

from pathlib import Path

import pytest

pytest.importorskip("textarena")

from tests.environments.adapters.playing import play, save


def test_a_game_is_found_by_its_hints_and_its_seed(tmp_path: Path) -> None:
    factory = save(tmp_path, "Number")
    low, high, said = 1, 20, list[str]()
    while True:
        guess = (low + high) // 2
        said.append(f"I say [{guess}].")
        replies, reward = play(factory, {"seed": 3}, *said)
        if replies[-1].done:
            break
        hint = replies[-1].observation
        assert hint in ("The target number is higher.", "The target number is lower.")
        low, high = (guess + 1, high) if "higher" in hint else (low, guess - 1)
    assert reward == 1.0 and len(said) <= 5
    assert isinstance(replies[0].observation, str) and "between 1 and 20" in replies[0].observation


def test_a_game_that_ends_by_wrong_moves_has_the_reward_of_the_package(tmp_path: Path) -> None:
    replies, reward = play(save(tmp_path, "Number"), {"seed": 3}, "no", "no")
    assert "invalid move" in str(replies[1].observation) and replies[2].done and reward == 0.0
