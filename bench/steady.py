"""Measure the resident memory of the processes of a long PPO run, step by step.

After every step each process notes its resident set and its peak so far. Memory is steady if the resident set
after the last steps is hardly larger than after step 20. Medians of ten steps are compared, since a single
step depends on the lengths it drew.

`tiny` makes its own models and prompts. `demo` is the PPO stage of `make demo`, evaluations included, and
reads the files of a finished `make demo`. Both run in one and in two processes.

    python bench/steady.py [--steps 300] [--cases tiny/1 tiny/2 demo/1 demo/2] [--demo .] [--json FILE]
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import yaml
from harness import ROOT, Results, make_parser

from realrl.runtime.processes.environment import LAUNCHER_VARIABLE, STORE_VARIABLE, leave
from realrl.runtime.processes.host_memory import read_memory

CASES = ("tiny/1", "tiny/2", "demo/1", "demo/2")
WARM = 20
"""Steps after which memory must not grow."""
WINDOW = 10
MIB = 2**20
TINY = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 192,
    "layers": 4,
    "heads": 4,
    "kv_heads": 2,
}
TINY |= {"head_dim": 16, "tied_embeddings": True}


def train_one_rank(recipe: str, changes: list[str], out: Path) -> None:
    """Train as one rank and write its memory after each step."""
    from realrl.cli.progress import Progress
    from realrl.recipe.load import load_experiment
    from realrl.runtime.train import train
    from realrl.runtime.training_run import TrainingRun

    rows: list[tuple[float, int, int]] = []

    class Measured(TrainingRun):
        def _train_step(self, step: int) -> None:
            begin = time.monotonic()
            super()._train_step(step)
            memory = read_memory()
            rows.append((round(time.monotonic() - begin, 4), memory.resident, memory.peak))

    with Progress() as progress:
        train(load_experiment(recipe, changes), progress, Measured)
    (out / f"rank-{os.environ.get('RANK', 0)}.json").write_text(json.dumps(rows))
    leave(0)


def make_tiny_world(directory: Path) -> str:
    """Write prompts, a tokenizer, an actor, a reward model and a recipe; return the recipe's path."""
    from realrl.huggingface.tokenizers import train_bpe
    from realrl.testing.records import list_sentences, make_up_records
    from realrl.testing.shrink import save_model

    tokenizer = train_bpe(list_sentences(), TINY["vocab_size"])
    for role, head in (("actor", "lm"), ("reward", "scalar")):
        save_model(directory / role, head, tokenizer, TINY)
    lines = [json.dumps(record) + "\n" for record in make_up_records("prompt")]
    (directory / "prompts.jsonl").write_text("".join(lines))
    recipe = {
        "algorithm": "ppo",
        "device": "cpu",
        "models": {
            "actor": {"path": str(directory / "actor"), "optimizer": {"lr": 1e-4}},
            "critic": {"optimizer": {"lr": 1e-4}},
            "reward": {"path": str(directory / "reward")},
        },
        "data": {"train": str(directory / "prompts.jsonl"), "batch": 64},
        "generation": {"max_new_tokens": 24},
        "ppo": {"minibatches": 2},
        "micro_batch_tokens": 512,
    }
    (directory / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return str(directory / "recipe.yaml")


def run(world: str, processes: int, steps: int, demo: Path) -> dict[str, Any]:
    """Run one case and summarise the memory of its processes."""
    with tempfile.TemporaryDirectory(prefix="realrl-steady-") as scratch:
        tiny = world == "tiny"
        recipe = make_tiny_world(Path(scratch)) if tiny else str(ROOT / "recipes/demo/ppo.yaml")
        changes = [f"training.steps={steps}", f"run_dir={scratch}/run", f"cluster=1x{processes}"]
        started = [_start(recipe, changes, scratch, rank, processes, demo) for rank in range(processes)]
        statuses = [process.wait() for process in started]
        if any(statuses):
            sys.exit(f"{world} on {processes} processes failed")
        files = [Path(scratch) / f"rank-{rank}.json" for rank in range(processes)]
        ranks = [json.loads(file.read_text()) for file in files]
    return {
        "steps": steps,
        "step_s": median(seconds for rank in ranks for seconds, *_ in rank[WARM:]),
        "processes": [_summarise(rank) for rank in ranks],
    }


def _start(
    recipe: str, changes: list[str], scratch: str, rank: int, world: int, demo: Path
) -> "subprocess.Popen[bytes]":
    several = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "GLOO_SOCKET_IFNAME": "lo",
        STORE_VARIABLE: str(Path(scratch) / "store"),
        LAUNCHER_VARIABLE: str(os.getpid()),
    }
    threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // world))}
    environment = {**threads, **os.environ, **(several if world > 1 else {})}
    command = [sys.executable, str(Path(__file__).resolve()), "--rank", scratch, recipe, *changes]
    return subprocess.Popen(command, env=environment, cwd=demo, stdin=subprocess.DEVNULL)


def _summarise(rows: list[tuple[float, int, int]]) -> dict[str, Any]:
    """Summarise the memory of a process: MiB after some steps, relative growth after step 20, and peaks."""
    resident = [row[1] / MIB for row in rows]
    early, late = median(resident[WARM : WARM + WINDOW]), median(resident[-WINDOW:])
    marks = sorted({1, 3, 10, WARM, 50, 100, 200, len(rows)} & set(range(1, len(rows) + 1)))
    return {
        "resident_mib": {str(step): round(resident[step - 1], 1) for step in marks},
        "growth": round(late / early - 1, 4),
        "largest_after_warm_up_mib": round(max(resident[WARM:]), 1),
        "peak_mib": {str(step): round(rows[step - 1][2] / MIB, 1) for step in marks},
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--demo", type=Path, default=ROOT, help="directory in which `make demo` was run")
    parser.add_argument("--rank", type=Path, help="internal: directory for the memory of a rank")
    parser.add_argument("recipe", nargs="*", help="internal: recipe and overrides of a rank")
    arguments = parser.parse_args()
    if arguments.rank is not None:
        recipe, *changes = arguments.recipe
        train_one_rank(recipe, changes, arguments.rank)
    results = Results(arguments.json)
    for case in arguments.cases:
        world, processes = case.split("/")
        results.add(case, run(world, int(processes), arguments.steps, arguments.demo))
        print(json.dumps({case: results.cases[case]}, indent=1), flush=True)


if __name__ == "__main__":
    main()
