"""Guessing game of the agent demo, and its records: python demo/guessing.py [--out data/demo_agent]

The model has four guesses to find a letter from a to p, and hears whether it comes earlier or later in the
alphabet. A single guess wins 6 % of all games, and four guesses that ignore the answers win at most 25 %. In most
of the games to imitate, the player guesses at random; in a few, the player listens, and halves what is left. The
environment rewards a game that ends with the right letter, so the model must find out by itself that listening
pays.
"""

import argparse
import json
import random
from pathlib import Path
from typing import Any

SEED = 1
LETTERS = "abcdefghijklmnop"
GUESSES = 4
GAMES = 16000
"""Number of games to imitate."""
LISTENERS = 0.15
"""Share of the games to imitate whose player listens to the answers, and halves what is left."""
QUESTION = f"{LETTERS[0]} to {LETTERS[-1]}?"


class Guess:
    """One game. The records have the letter, `secret`."""

    def reset(self, secret: str) -> None:
        self.secret, self.guesses = secret, 0

    def step(self, text: str) -> tuple[str, float, bool]:
        """Answer a guess: what to say, the reward, and whether the game is over."""
        self.guesses += 1
        if text == self.secret:
            return "right", 1.0, True
        known = len(text) == 1 and text in LETTERS
        answer = "one letter" if not known else "later" if text < self.secret else "earlier"
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
        "letters": [{"prompt": QUESTION, "secret": letter} for letter in LETTERS] * 2,
        "evaluation": [{"prompt": QUESTION, "secret": letter} for letter in LETTERS] * 16,
    }
    for name, rows in records.items():
        (out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"{out}: " + ", ".join(f"{len(rows)} {name}" for name, rows in records.items()))


def play(draw: random.Random) -> dict[str, Any]:
    """Play a game, as a record to imitate. The player either halves what is left, or guesses at random."""
    game, listens = Guess(), draw.random() < LISTENERS
    game.reset(draw.choice(LETTERS))
    messages = [{"role": "user", "content": QUESTION}]
    left, over = list(LETTERS), False
    while not over:
        guess = left[len(left) // 2] if listens else draw.choice(LETTERS)
        answer, _, over = game.step(guess)
        left = [letter for letter in left if (letter > guess) == (answer == "later") and letter != guess]
        messages += [{"role": "assistant", "content": guess}, {"role": "user", "content": answer}]
    return {"messages": messages[:-1]}


if __name__ == "__main__":
    main()
