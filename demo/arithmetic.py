"""Make the arithmetic demo's records: python demo/arithmetic.py [--out data/demo_grpo]

The problems are sums of two numbers below 100. A quarter of the answers to imitate work the sum out digit by digit,
as in "5+7=12, 2+3+1=6, so 62". The other answers are guesses nearby. A model that imitates these answers is right
in a quarter of all cases at best. It must learn from a verifier to work sums out carefully. The verifier looks only
at the last number of an answer.
"""

import argparse
import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

SEED = 1
HELD_OUT = 300
"""Number of problems that are held out for evaluation."""
ANSWERS = 8000
"""Number of answers to imitate. Some problems occur twice."""
WORKED_OUT = 0.25
"""Share of the answers to imitate that show their work."""
MISSED_BY = 9
"""Largest error of the answers that are guesses."""


def main() -> None:
    """Write the records, and one line about them."""
    parser = argparse.ArgumentParser(description="Make the arithmetic demo's records.")
    parser.add_argument("--out", type=Path, default=Path("data/demo_grpo"), help="folder to write to")
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    records = make_records()
    for name, rows in records.items():
        (out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"{out}: " + ", ".join(f"{len(rows)} {name}" for name, rows in records.items()))


def make_records() -> dict[str, list[dict[str, Any]]]:
    """Make answers to imitate, problems to train on and problems to evaluate on."""
    draw = random.Random(SEED)
    problems = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    draw.shuffle(problems)
    held_out, known = problems[:HELD_OUT], problems[HELD_OUT:]
    answers = []
    for number in range(ANSWERS):
        a, b = known[number % len(known)]
        answer = work_out(a, b) if draw.random() < WORKED_OUT else guess(a, b, draw)
        answers.append({"prompt": ask(a, b), "completion": answer})
    return {"answers": answers, "problems": _with_results(known), "held_out": _with_results(held_out)}


def ask(a: int, b: int) -> str:
    """Write a problem."""
    return f"{a}+{b}=?\n"


def work_out(a: int, b: int) -> str:
    """Add two numbers of two digits as people do on paper: from the last digit to the first, with a carry."""
    ones = a % 10 + b % 10
    carry = ones // 10
    tens = a // 10 + b // 10 + carry
    return f"{a % 10}+{b % 10}={ones}, {a // 10}+{b // 10}{'+1' if carry else ''}={tens}, so {a + b}"


def guess(a: int, b: int, draw: random.Random) -> str:
    """Write a wrong sum that is off by up to `MISSED_BY`."""
    return f"{a + b + draw.choice([-1, 1]) * draw.randint(1, MISSED_BY)}"


def _with_results(problems: Iterable[tuple[int, int]]) -> list[dict[str, Any]]:
    return [{"prompt": ask(a, b), "answer": str(a + b)} for a, b in problems]


if __name__ == "__main__":
    main()
