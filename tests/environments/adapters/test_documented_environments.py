"""The environments that docs/environments.md walks through do what it says."""

from pathlib import Path

from realrl.environments.reply import Reply
from tests.environments.adapters.playing import call, play, save


def test_the_guessing_game_is_won_by_listening(tmp_path: Path) -> None:
    guess = save(tmp_path, "Guess")
    replies, reward = play(guess, {"secret": 42}, "50", "a lot", "42")
    assert [reply.observation for reply in replies] == [
        "I think of a number from 1 to 100.",
        "Lower.",
        "Higher.",
        "Right.",
    ]
    assert replies[-1].done and reward == 1.0


def test_the_calculator_rewards_the_right_sum(tmp_path: Path) -> None:
    calculator = save(tmp_path, "Calculator")
    record = {"question": "1 + 2?", "answer": 3}
    replies, reward = play(calculator, record, call("add", a=1, b=2), "It is 3.")
    assert replies[1].observation == [{"role": "tool", "name": "add", "content": "3"}]
    assert replies[2] == Reply(done=True) and reward == 1.0
    assert play(calculator, record, call("add", a=1, b=1), "It is 2.")[1] == 0.0
