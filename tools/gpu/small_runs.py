"""Trains tiny models by `realrl train` on the device, all runs side by side, each with a time limit."""

import json
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from results import BEGUN, CPU, DEVICE, LIMIT, record

from realrl.testing.shape import SHAPE
from tests.conftest import build_world

PLAN = """
cluster: 1x1
calls:
  actor.generate: {mesh: 0, dp: 1}
  reward.inference: {mesh: 0, dp: 1}
  ref.inference: {mesh: 0, dp: 1}
  critic.inference: {mesh: 0, dp: 1}
  actor.train: {mesh: 0, dp: 1, recompute: true}
  critic.train: {mesh: 0, dp: 1}
offload: [actor, critic, ref, reward]
offload_optimizer: [actor, critic]
"""
HALF = {f"models__{role}__dtype": "bfloat16" for role in ("actor", "ref", "reward")}
FOUR = {**HALF, "models__critic__dtype": "bfloat16"}
RUNS = {
    "sft-float32": ("sft", {"models__actor__dtype": "float32"}),
    "sft-bfloat16": ("sft", {"models__actor__dtype": "bfloat16"}),
    "ppo-offload": ("ppo", {**FOUR, "plan": PLAN}),
    "grpo": ("grpo", HALF),
    "grpo-exact": ("grpo", {**HALF, "exact": True}),
    "grpo-restricted": ("grpo", {**HALF, "generation__top_p": 0.9, "generation__min_new_tokens": 3}),
}


def judge(name: str, directory: Path, status: int | None, seconds: float) -> bool:
    """Check the metrics that a run has written, and record them."""
    file = directory / "run" / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    steps = [line for line in lines if line.get("kind") == "train"]
    bad = [
        key
        for step in steps
        for key, value in step["metrics"].items()
        if isinstance(value, float) and not math.isfinite(value)
    ]
    mismatches = [step["metrics"].get("actor.train/sampler_trainer_mismatch") for step in steps]
    mismatch = max((value for value in mismatches if value is not None), default=None)
    good = status == 0 and len(steps) == 5 and not bad
    if name == "grpo-exact" and mismatch is not None:
        good &= mismatch == 0.0
    last = steps[-1]["metrics"] if steps else {}
    shown = {
        key: last[key]
        for key in last
        if key.rpartition("/")[2] in ("loss", "policy_loss_per_token", "grad_norm", "entropy")
    }
    print(
        f"{'ok  ' if good else 'FAIL'} {name}: status {status}, {len(steps)} steps, {seconds:.0f} s,",
        f"mismatch {mismatch}, not finite: {sorted(set(bad))[:4]}, {shown}",
        flush=True,
    )
    record(
        "run",
        name,
        status="ok" if good else "FAIL",
        seconds=seconds,
        exit=status,
        steps=len(steps),
        mismatch=mismatch,
        last=last,
    )
    if not good:
        print(
            "     " + "\n     ".join((directory / "log").read_text(errors="replace").splitlines()[-25:]),
            flush=True,
        )
    return good


def main() -> int:
    names = sys.argv[1:] or list(RUNS)
    good = True
    with tempfile.TemporaryDirectory(prefix="gpu-small-runs-") as scratch:
        world = build_world(Path(scratch), SHAPE)
        running = {}
        for name in names:
            algorithm, changes = RUNS[name]
            directory = Path(scratch) / name
            directory.mkdir()
            changes = dict(changes)
            if "plan" in changes:
                (directory / "plan.yaml").write_text(changes["plan"])
                changes["plan"] = str(directory / "plan.yaml")
            if CPU:
                changes = {
                    key: ("float32" if value == "bfloat16" else value) for key, value in changes.items()
                }
            recipe = world.recipe(algorithm, directory, device=DEVICE, **changes)
            log = (directory / "log").open("w")
            running[name] = (
                subprocess.Popen(
                    [sys.executable, "-m", "realrl", "train", str(recipe)],
                    stdout=log,
                    stderr=subprocess.STDOUT,
                ),
                time.monotonic(),
                directory,
            )
        while running:
            for name, (process, begun, directory) in list(running.items()):
                late = time.monotonic() > BEGUN + LIMIT - 5
                if process.poll() is None and late:
                    process.kill()
                    process.wait()
                if process.poll() is not None:
                    good &= judge(name, directory, process.returncode, time.monotonic() - begun)
                    del running[name]
            time.sleep(0.2)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
