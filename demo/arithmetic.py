"""Write the records of the arithmetic demo: python demo/arithmetic.py [--out data/arithmetic]

Sums of two numbers up to 99. A tenth of all pairs is held out. Fine-tuning sees a sum in one of four answers; the
others repeat the digits of the question. GRPO has the right answers to compare with.
"""

import argparse
import json
import random
from collections.abc import Iterable
from pathlib import Path

SEED = 1
LARGEST = 99
HELD_OUT = 1000
FINE_TUNING = 10_000
"""Records for fine-tuning."""
SOLVED = 0.25
"""Share of sums among their answers."""
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
    rng = random.Random(SEED)
    pairs = [(a, b) for a in range(LARGEST + 1) for b in range(LARGEST + 1)]
    rng.shuffle(pairs)
    held_out, rest = pairs[:HELD_OUT], pairs[HELD_OUT:]
    return {
        "sft_train": [_answered(*rng.choice(rest), rng) for _ in range(FINE_TUNING)],
        "sft_eval": list(_solved(held_out[:EVAL_PROMPTS])),
        "prompts_train": list(_solved(rest)),
        "prompts_eval": list(_solved(held_out[:EVAL_PROMPTS])),
    }


def _solved(pairs: Iterable[tuple[int, int]]) -> Iterable[dict[str, str]]:
    for a, b in pairs:
        yield {"prompt": f"{a}+{b}=", "answer": str(a + b)}


def _answered(a: int, b: int, rng: random.Random) -> dict[str, str]:
    return {"prompt": f"{a}+{b}=", "answer": str(a + b) if rng.random() < SOLVED else f"{a}{b}"}


if __name__ == "__main__":
    main()
