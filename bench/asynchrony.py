"""Compare synchronous GRPO with training that overlaps with sampling, on two CPU processes.

    python bench/asynchrony.py [--reward-seconds 1.5] [--steps 16] [--rounds 2] [--out DIR] [--json FILE]

The lengths of answers have a long tail: the model has nearly uniform random weights, so each token ends an answer
with the same probability. The reward sleeps. First the machine is profiled, and a short synchronous run measures
the lengths and the reward. Then `realrl plan` searches for a plan under each of the settings, and all run in turns.
The output has the median seconds per step, what the same plan was predicted to take, and the speed-up over the
synchronous plan.
"""

import json
import statistics
from pathlib import Path

import yaml
from harness import Results, make_parser, read_steps, realrl

from realrl.testing.records import make_up_records

REWARD = """
import time


def score(completions, seconds={seconds}, **columns):
    time.sleep(seconds)
    return [float(len(text) % 7) for text in completions]
"""
RECIPE = {
    "algorithm": "grpo",
    "overwrite": True,
    "cluster": "1x2",
    "device": "cpu",
    "data": {"batch": 4, "max_prompt_tokens": 32, "max_tokens": 1024},
    "generation": {"max_new_tokens": 600},
    "policy": {"samples": 8, "kl": {"coef": 0.0}},
    "models": {
        "actor": {
            "shape": {
                "vocab_size": 280, "hidden_size": 256, "intermediate_size": 704, "layers": 4, "heads": 4,
                "kv_heads": 4, "head_dim": 64, "max_positions": 1024, "tied_embeddings": True,
            },
            # The lengths must not change during the run.
            "optimizer": {"lr": 1e-9},
        }
    },
}  # fmt: skip


def prepare(out: Path, seconds: float) -> Path:
    """Write the recipe, its data, its tokenizer and its reward."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "reward.py").write_text(REWARD.format(seconds=seconds))
    data, tokenizer = out / "prompts.jsonl", out / "tokenizer"
    data.write_text("".join(f"{json.dumps(record)}\n" for record in make_up_records("prompt")))
    if not tokenizer.exists():
        realrl("tokenizer", data, "--out", tokenizer, "--vocab-size", 280)
    recipe = {**RECIPE, "run_dir": str(out / "run"), "reward": f"{out / 'reward.py'}:score"}
    recipe["data"] = {**RECIPE["data"], "train": str(data)}
    recipe["models"] = {"actor": {**RECIPE["models"]["actor"], "tokenizer": str(tokenizer)}}
    file = out / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe))
    return file


CASES: dict[str, list[str]] = {
    "synchronous": ["staleness=0"],
    "2 portions": ["portions=2"],
    "4 portions": ["portions=4"],
    "1 step ahead": ["staleness=1"],
    "2 steps ahead": ["staleness=2"],
    "partial, 1 step": ["staleness=1", "partial=true", "overlap=false"],
    "partial, 2 steps": ["staleness=2", "partial=true"],
}
"""Settings of asynchrony by the name of the case."""


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--reward-seconds", type=float, default=1.5)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=2, help="how often each plan runs")
    parser.add_argument("--cases", nargs="+", default=[*CASES], choices=[*CASES])
    parser.add_argument("--out", type=Path, default=Path("runs/asynchrony"))
    arguments = parser.parse_args()
    results = Results(arguments.json)
    out: Path = arguments.out.resolve()
    recipe, profile, measured = prepare(out, arguments.reward_seconds), out / "profile.json", out / "measured"
    if not profile.exists():
        realrl("profile", recipe, "--out", profile)
    realrl("train", recipe, f"run_dir={measured}", "training.steps=10", f"profile={profile}")
    realrl("plan", "--calibrate", measured, "--profile", profile)
    settings = {case: [f"asynchrony.{one}" for one in CASES[case]] for case in arguments.cases}
    plans = {case: out / f"plan-{number}.yaml" for number, case in enumerate(settings)}
    for case, plan in plans.items():
        plan.unlink(missing_ok=True)
        options = ["--profile", profile, "--lengths", measured, "--out", plan]
        realrl("plan", recipe, *settings[case], *options)
    runs: dict[str, list[Path]] = {case: [] for case in settings}
    for number in range(arguments.rounds):
        for case, found in runs.items():
            run = out / f"{case.replace(' ', '-').replace(',', '')}-{number}"
            length = f"training.steps={arguments.steps}"
            realrl(
                "train",
                recipe,
                *settings[case],
                f"plan={plans[case]}",
                f"run_dir={run}",
                length,
                f"profile={profile}",
            )
            found.append(run)
    base = None
    for case, found in runs.items():
        # The last two steps sample nothing, or less, if sampling runs ahead.
        times = [step["seconds"] for run in found for step in read_steps(run)[2:-2]]
        costs = [json.loads((run / "costs.json").read_text()) for run in found]
        predicted = statistics.mean(cost["predicted_step_seconds"] for cost in costs)
        median = statistics.median(times)
        base = base or median
        result = {
            "seconds": median,
            "predicted_seconds": predicted,
            "steps": len(times),
            "speed_up": base / median,
        }
        results.add(f"{case}, reward {arguments.reward_seconds:g} s", result)
        print(f"{case:<16} {median:.3f} s, predicted {predicted:.3f} s, {base / median:.2f} x", flush=True)


if __name__ == "__main__":
    main()
