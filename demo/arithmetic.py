"""Write the records of the arithmetic demo: python demo/arithmetic.py [--out data/arithmetic]

Sums of two numbers up to 99. A tenth of all pairs is held out; fine-tuning sees few of the others, so that the model
learns the form of answers and gets some of them right, and GRPO has all of them as prompts.
"""

import argparse
import json
import random
from collections.abc import Iterable
from pathlib import Path

SEED = 1
LARGEST = 99
HELD_OUT = 1000
FINE_TUNING = 2500
"""Solved sums for fine-tuning."""
EVAL_PROMPTS = 500


def main() -> None:
    """Write the records, and one line about them."""
    parser = argparse.ArgumentParser(description="Write the records of the arithmetic demo.")
    parser.add_argument("--out", type=Path, default=Path("data/arithmetic"), help="folder to write to")
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    records = make_records()
    for name, rows in records.items():
        (out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"{out}: " + ", ".join(f"{len(rows)} {name}" for name, rows in records.items()))


def make_records() -> dict[str, list[dict[str, str]]]:
    """Make the records by file name."""
    pairs = [(a, b) for a in range(LARGEST + 1) for b in range(LARGEST + 1)]
    random.Random(SEED).shuffle(pairs)
    held_out, rest = pairs[:HELD_OUT], pairs[HELD_OUT:]
    return {
        "sft_train": list(_solved(rest[:FINE_TUNING])),
        "sft_eval": list(_solved(held_out[:EVAL_PROMPTS])),
        "prompts_train": list(_solved(rest)),
        "prompts_eval": list(_solved(held_out[:EVAL_PROMPTS])),
    }


def _solved(pairs: Iterable[tuple[int, int]]) -> Iterable[dict[str, str]]:
    for a, b in pairs:
        yield {"prompt": f"{a}+{b}=", "answer": str(a + b)}


if __name__ == "__main__":
    main()
