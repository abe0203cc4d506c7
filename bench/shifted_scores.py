"""PPO with reward models whose scores are shifted: what is learned must not depend on where zero is.

Bradley-Terry leaves a reward model's scores open up to a constant, so that a mean of 4 or -4 is as good as any.
The demo's reward model is shifted along the direction of its hidden states that is nearest to a constant; the
critic starts from it, and both predict on the shifted scale. A few steps of the demo's PPO run with each, and are
compared with those of the model as it is: how much of the returns' variance the critic explains, how many answers
end by themselves, and what the independent judge says.

    make demo && python bench/shifted_scores.py [--steps N] [--shift S] [--json FILE]
"""

import argparse
import json
import platform
import shutil
import statistics
import sys
import tempfile
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from realrl.cli.app import run_app
from realrl.data.records import read_records
from realrl.data.rejects import Rejects

RECIPE, TEXTS = "recipes/demo/ppo.yaml", "data/demo/reward_eval.jsonl"
LIMITS = {"explained_variance": 0.15, "finished": 0.15, "judge": 0.1}
"""How far a shifted run may be from the other one; runs with other seeds differ by about a third of it."""


def shift_model(source: Path, target: Path, shift: float) -> tuple[float, float]:
    """Save a reward model with shifted scores; mean and deviation, over all tokens, of what was added to them."""
    model, tokenizer = (
        AutoModelForSequenceClassification.from_pretrained(source),
        AutoTokenizer.from_pretrained(source),
    )
    records = [record for _, record in read_records(TEXTS, Rejects("fail"))][:500]
    hidden = []
    with torch.no_grad():
        for record in records:
            ids = tokenizer(record["prompt"] + record["chosen"], return_tensors="pt")["input_ids"]
            hidden.append(model.model(ids).last_hidden_state[0].double())
        states = torch.cat(hidden)
        ones = torch.ones(len(states), 1, dtype=torch.float64)
        direction = torch.linalg.lstsq(states, ones).solution[:, 0]
        added = shift * (states @ direction)
        model.score.weight += (shift * direction).float()
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    return added.mean().item(), added.std().item()


def run(reward: Path, directory: Path, steps: int, overrides: Sequence[str]) -> dict[str, float]:
    """Train, and give the figures that are compared."""
    changes = [
        f"models.reward.path={reward}",
        f"run_dir={directory}",
        "overwrite=true",
        f"training.steps={steps}",
    ]
    status = run_app(["train", RECIPE, *changes, "training.eval_every=null", *overrides])
    if status:
        sys.exit(status)
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    training = [line["figures"] for line in lines if line["kind"] == "train"]
    last = [line["figures"] for line in lines if line["kind"] == "eval"][-1]
    return {
        "explained_variance": statistics.mean(f["critic.train/explained_variance"] for f in training[1:]),
        "finished": last["reward.inference/finished"],
        "judge": last["judge"],
        "score": last["reward.inference/score"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, default=Path("runs/demo"), help="runs of `make demo`")
    parser.add_argument("--steps", type=int, default=12, help="PPO steps of each run")
    parser.add_argument("--shift", type=float, default=4.0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="also for the recipe")
    arguments = parser.parse_args()
    source = arguments.runs / "reward" / "final"
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for shift in (0.0, arguments.shift, -arguments.shift):
            model = Path(scratch) / f"reward{shift:+g}"
            mean, deviation = shift_model(source, model, shift)
            overrides = [f"models.actor.path={arguments.runs / 'sft' / 'final'}", *arguments.set]
            figures = run(model, Path(scratch) / f"run{shift:+g}", arguments.steps, overrides)
            found[f"{shift:+g}"] = {"added": {"mean": mean, "deviation": deviation}, **figures}
            shutil.rmtree(Path(scratch) / f"run{shift:+g}")
    plain, failed = found["+0"], False
    print(f"\n{'shift':>6}  {'added to scores':>16}  explained variance  finished   judge   score")
    for name, row in found.items():
        added = f"{row['added']['mean']:.2f} ± {row['added']['deviation']:.2f}"
        print(
            f"{name:>6}  {added:>16}  {row['explained_variance']:>18.2f}  {row['finished']:>8.2f}"
            f"  {row['judge']:>6.3f}  {row['score']:>6.2f}"
        )
        failed |= any(abs(row[key] - plain[key]) > limit for key, limit in LIMITS.items())
    if arguments.json:
        machine = {"machine": platform.processor() or platform.machine(), "torch": torch.__version__}
        about = {"date": str(date.today()), **machine, "steps": arguments.steps, "runs": found}
        arguments.json.write_text(json.dumps(about, indent=2) + "\n")
    if failed:
        sys.exit(f"a shifted run is further from the other one than {LIMITS}")


if __name__ == "__main__":
    main()
