"""Steps of the demo's recipes on one process with all cores, and on one process per core.

The demo must have been run (`make demo`, `make demo-grpo`): its data and models are read. Every round starts each
way once; the figure of a round is the median of its steps but the first ones.

    python bench/processes.py [--stages sft ppo grpo] [--rounds 5] [--steps 12] [--demo .] [--json FILE]
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from results_file import ResultsFile

ROOT = Path(__file__).parents[1]
STAGES = {"sft": "demo/sft", "reward": "demo/reward", "ppo": "demo/ppo", "grpo": "demo_grpo/grpo"}
CORES = os.cpu_count() or 1
WAYS = {
    "one process": ["cluster=cpu:1x1"],
    "a process per core, symmetric": [f"cluster=cpu:1x{CORES}", "plan=symmetric"],
    "a process per core, searched plan": [f"cluster=cpu:1x{CORES}", "plan=search"],
}
WARM = 2
"""Steps that are left out."""


def measure(stage: str, changes: list[str], steps: int, demo: Path) -> float:
    """Train for some steps and return the median seconds of one."""
    with tempfile.TemporaryDirectory(prefix="realrl-processes-") as scratch:
        recipe = ROOT / "recipes" / f"{STAGES[stage]}.yaml"
        more = [*changes, f"run_dir={scratch}/run", f"training.steps={steps}", "evaluation.every=null"]
        command = [sys.executable, "-m", "realrl", "train", str(recipe), *more]
        done = subprocess.run(command, cwd=demo, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{stage} {' '.join(changes)}: {done.stderr[-2000:]}")
        lines = (Path(scratch) / "run" / "metrics.jsonl").read_text().splitlines()
    seconds = [row["seconds"] for row in map(json.loads, lines) if row["kind"] == "train"]
    return median(seconds[WARM:])


def main() -> None:
    """Measure each way in turns, and print and store seconds and ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=["sft", "ppo", "grpo"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--demo", type=Path, default=ROOT, help="directory in which the demo was run")
    parser.add_argument("--json", type=Path, default=ROOT / "bench/results/processes.json")
    options = parser.parse_args()
    results = ResultsFile(options.json)
    for stage in options.stages:
        rounds = [
            {way: measure(stage, changes, options.steps, options.demo) for way, changes in WAYS.items()}
            for _ in range(options.rounds)
        ]
        first = next(iter(WAYS))
        result = {}
        for way in WAYS:
            ratios = [row[way] / row[first] for row in rounds]
            result[way] = {
                "step_s": round(median(row[way] for row in rounds), 4),
                "beside_one_process": round(median(ratios), 3),
                "range": [round(min(ratios), 3), round(max(ratios), 3)],
            }
            print(stage, way, result[way], flush=True)
        results.add(stage, {"rounds": options.rounds, "steps": options.steps, **result})


if __name__ == "__main__":
    main()
