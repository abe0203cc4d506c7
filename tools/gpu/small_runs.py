"""Train tiny models with `realrl train`. On a GPU the runs share the device; in a dry run they take turns."""

import json
import math
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from results import BEGUN, CPU, DEVICE, LIMIT, record

from realrl.testing.shrink import SHAPE
from tests.conftest import World, build_world

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
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "sft-float32": ("sft", {"models__actor__dtype": "float32"}),
    "sft-bfloat16": ("sft", {"models__actor__dtype": "bfloat16"}),
    "ppo-offload": ("ppo", {**HALF, "models__critic__dtype": "bfloat16", "plan": PLAN}),
    "grpo": ("grpo", HALF),
    "grpo-exact": ("grpo", {**HALF, "exact": True}),
    "grpo-restricted": ("grpo", {**HALF, "generation__top_p": 0.9, "generation__min_new_tokens": 3}),
}
"""Algorithm of each run, and the settings in which its recipe differs from `World.recipe`."""
STEPS = 5
"""Training steps of the recipes that `World.recipe` writes."""
SHOWN = ("loss", "policy_loss_per_token", "grad_norm", "entropy")


def train(world: World, name: str) -> bool:
    """Run `realrl train` until it ends or the time of the stage is over. Returns whether its metrics are good."""
    algorithm, changes = RUNS[name]
    directory = world.root / name
    directory.mkdir()
    if "plan" in changes:
        (directory / "plan.yaml").write_text(changes["plan"])
        changes = {**changes, "plan": str(directory / "plan.yaml")}
    if CPU:
        changes = {key: "float32" if value == "bfloat16" else value for key, value in changes.items()}
    recipe = world.recipe(algorithm, directory, device=DEVICE, **changes)
    begin = time.monotonic()
    with (directory / "log").open("w") as log:
        command = [sys.executable, "-m", "realrl", "train", str(recipe)]
        left = None if math.isinf(LIMIT) else max(0.0, BEGUN + LIMIT - 5 - begin)
        try:
            status = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, timeout=left).returncode
        except subprocess.TimeoutExpired:
            status = None
    return judge(name, directory, status, time.monotonic() - begin)


def judge(name: str, directory: Path, status: int | None, seconds: float) -> bool:
    """Check the metrics that a run has written, and record them. `status` is None if the time was over."""
    file = directory / "run" / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    steps = [line["metrics"] for line in lines if line.get("kind") == "train"]
    bad = {key for step in steps for key, value in step.items() if not math.isfinite(value)}
    mismatches = [step.get("actor.train/sampler_trainer_mismatch", 0.0) for step in steps]
    mismatch = max(mismatches, default=math.nan)
    good = status == 0 and len(steps) == STEPS and not bad and (name != "grpo-exact" or mismatch == 0.0)
    last = steps[-1] if steps else {}
    shown = {key: round(value, 5) for key, value in last.items() if key.rpartition("/")[2] in SHOWN}
    found = {"exit": status, "steps": len(steps), "seconds": round(seconds), "mismatch": mismatch}
    print("ok  " if good else "FAIL", name, found, f"not finite: {sorted(bad)[:4]}", shown, flush=True)
    record("run", name, status="ok" if good else "FAIL", **found, last=last)
    if not good:
        log = (directory / "log").read_text(errors="replace").splitlines()
        print("     " + "\n     ".join(log[-25:]), flush=True)
    return good


def main() -> int:
    with (
        tempfile.TemporaryDirectory(prefix="gpu-small-runs-") as scratch,
        ThreadPoolExecutor(max_workers=1 if CPU else len(RUNS)) as pool,
    ):
        world = build_world(Path(scratch), SHAPE)
        results = [pool.submit(train, world, name) for name in RUNS]
        return 0 if all(result.result() for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
