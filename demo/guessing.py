"""Guessing game of the agent demo, and its records: python demo/guessing.py [--out data/demo_agent]

The model has six guesses to find a number from 0 to 31, and hears whether the number is higher or lower. In a
single turn, it would be right in 3 % of all cases. In most of the games to imitate, the player guesses at random;
in the others, the player listens. The environment rewards a game that ends with the right number, so the model must
find out by itself that listening pays.
"""

import argparse
import json
import random
from pathlib import Path
from typing import Any

SEED = 1
NUMBERS = 32
GUESSES = 6
GAMES = 6000
"""Number of games to imitate."""
LISTENERS = 0.2
"""Share of the games to imitate whose player listens to the answers."""
QUESTION = f"0 to {NUMBERS - 1}?"


class Guess:
    """One game. The records have the number, `secret`."""

    def reset(self, secret: int) -> None:
        self.secret, self.guesses = secret, 0

    def step(self, text: str) -> tuple[str, float, bool]:
        """Answer a guess: what to say, the reward, and whether the game is over."""
        self.guesses += 1
        guess = int(text) if text.strip().isdecimal() else None
        if guess == self.secret:
            return "right", 1.0, True
        answer = "a number" if guess is None else "higher" if guess < self.secret else "lower"
        return answer, 0.0, self.guesses == GUESSES


def main() -> None:
    """Write the records, and one line about them."""
    parser = argparse.ArgumentParser(description="Make the agent demo's records.")
    parser.add_argument("--out", type=Path, default=Path("data/demo_agent"), help="folder to write to")
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    draw = random.Random(SEED)
    records = {
        "games": [play(draw) for _ in range(GAMES)],
        "numbers": [{"prompt": QUESTION, "secret": secret} for secret in range(NUMBERS)],
        "held_out": [{"prompt": QUESTION, "secret": secret} for secret in range(NUMBERS)] * 8,
    }
    for name, rows in records.items():
        (out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"{out}: " + ", ".join(f"{len(rows)} {name}" for name, rows in records.items()))


def play(draw: random.Random) -> dict[str, Any]:
    """Play a game, as a record to imitate. The player either listens or guesses at random."""
    game, listens = Guess(), draw.random() < LISTENERS
    game.reset(draw.randrange(NUMBERS))
    messages = [{"role": "user", "content": QUESTION}]
    least, most, over = 0, NUMBERS - 1, False
    while not over:
        guess = draw.randint(least, most) if listens else draw.randrange(NUMBERS)
        answer, _, over = game.step(str(guess))
        least, most = (guess + 1, most) if answer == "higher" else (least, guess - 1)
        messages += [{"role": "assistant", "content": str(guess)}, {"role": "user", "content": answer}]
        if not listens:
            least, most = 0, NUMBERS - 1
    return {"messages": messages[:-1]}


if __name__ == "__main__":
    main()
