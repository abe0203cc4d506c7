"""Learn to use a hint: the model answers, hears how many letters are right, and answers again.

No built-in algorithm has two turns. The second answer continues the tokens of the first turn, and only the second
answer is trained. `python examples/prepare.py` makes the data, and examples/own_loop.py is a simpler loop.

    python examples/second_try.py --steps 40
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from own_loop import MODEL, PROMPTS, SAMPLES
from verifier import names_one

import realrl


def give_hint(score: float) -> str:
    """Write what the model hears after its first answer."""
    return " yes;" if score == 1 else " close;" if score > 0 else " no;"


def train(
    session: realrl.Session, records: Sequence[dict[str, Any]], steps: int
) -> Iterator[dict[str, float]]:
    """Train by REINFORCE, with the score of the first try as the baseline. Yields the scores of both tries."""
    for step in range(steps):
        chosen = [records[(step * PROMPTS + i) % len(records)] for i in range(PROMPTS)]
        accepted = [record["accepted"] for record in chosen for _ in range(SAMPLES)]
        first = session.sample([record["prompt"] for record in chosen], n=SAMPLES, max_new_tokens=4)
        before = torch.tensor(names_one(first.completions, accepted))
        hints = session.tokenize([give_hint(float(score)) for score in before])
        second = session.sample(
            [[*turn, *hint] for turn, hint in zip(first.sequences, hints, strict=True)], max_new_tokens=4
        )
        after = torch.tensor(names_one(second.completions, accepted))
        second["advantages"] = after - before
        session.forward_backward("actor", second, lambda model, batch: -batch.advantages * model.logprobs)
        yield {"first": float(before.mean()), "second": float(after.mean()), **session.step("actor")}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    steps = parser.parse_args().steps
    questions = [json.loads(line) for line in Path("data/examples/questions.jsonl").read_text().splitlines()]
    actor = {**MODEL, "optimizer": {"lr": 1e-2}}
    with realrl.Session({"actor": actor}, train="actor", device="cpu") as opened:
        for number, found in enumerate(train(opened, questions, steps), 1):
            print(f"step {number}: score {found['first']:.3f}, after the hint {found['second']:.3f}")
