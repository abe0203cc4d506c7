"""Compare predicted and measured steps of GRPO whose environment takes a known time to answer.

    python bench/waiting.py --recipe-only && realrl profile runs/waiting/0s.yaml --out profile.json
    python bench/waiting.py --profile profile.json [--seconds 0 0.1 0.5] [--out runs/waiting]

There are two CPU processes. A trajectory has four turns of at most 12 tokens, and an object sleeps at `reset` and
after each turn. The model has random weights: 4 layers of width 256. It uses the tokenizer and the prompts of
`make demo-agent`.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import yaml

ENVIRONMENT = """
import asyncio


class Slow:
    def __init__(self, seconds):
        self.seconds = seconds

    async def reset(self, **record):
        self.turns = 0
        await asyncio.sleep(self.seconds)

    async def step(self, text):
        self.turns += 1
        await asyncio.sleep(self.seconds)
        return "go on", float(len(text) % 3), self.turns >= 4
"""
RECIPE = {
    "algorithm": "grpo",
    "overwrite": True,
    "cluster": "1x2",
    "device": "cpu",
    "data": {"train": "data/demo_agent/letters.jsonl", "batch": 4, "max_prompt_tokens": 32, "max_tokens": 256},
    "generation": {"max_new_tokens": 200},
    "policy": {"kl": {"coef": 0.0}},
    "training": {"steps": 24},
    "models": {
        "actor": {
            "tokenizer": "data/demo_agent/tokenizer",
            "shape": {
                "vocab_size": 280, "hidden_size": 256, "intermediate_size": 704, "layers": 4, "heads": 4,
                "kv_heads": 4, "head_dim": 64, "max_positions": 512, "tied_embeddings": True,
            },
        }
    },
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--profile", type=Path, help="measured speeds of this machine")
    parser.add_argument("--seconds", type=float, nargs="+", default=[0.0, 0.1, 0.5], help="of one answer")
    parser.add_argument("--out", type=Path, default=Path("runs/waiting"))
    parser.add_argument("--recipe-only", action="store_true", help="write the recipe, and stop")
    arguments = parser.parse_args()
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    (out / "slow.py").write_text(ENVIRONMENT)
    for seconds in arguments.seconds:
        environment = {
            "factory": f"{(out / 'slow.py').resolve()}:Slow",
            "options": {"seconds": seconds},
            "max_turn_tokens": 12,
            "threads": 64,
        }
        run = out / f"{seconds:g}s"
        recipe = {**RECIPE, "run_dir": str(run), "environment": environment}
        if arguments.profile is not None:
            recipe["profile"] = str(arguments.profile.resolve())
        file = out / f"{seconds:g}s.yaml"
        file.write_text(yaml.safe_dump(recipe))
        if arguments.recipe_only:
            print(file)
            continue
        subprocess.run(
            [sys.executable, "-m", "realrl", "train", str(file)], check=True, stdout=subprocess.DEVNULL
        )
        costs = json.loads((run / "costs.json").read_text())
        call = next(call for call in costs["calls"] if call["call"]["name"] == "actor.generate")
        for name, predicted, measured in (
            ("actor.generate", call["predicted_seconds"], call["seconds"]["median"]),
            ("whole step", costs["predicted_step_seconds"], costs["step"]["median"]),
        ):
            print(f"{seconds:4g} s  {name:<15} predicted {predicted:.3f} s, measured {measured:.3f} s")


if __name__ == "__main__":
    main()
