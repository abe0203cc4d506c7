"""Measure steps of the demos, and of a plain `transformers` training loop, while busy processes run.

It reads the data and models of a finished `make demo` and `make demo-grpo`. Each training is started once and
keeps running while busy loops come and go in turns: none, one, two, none, and so on. A step counts if it
began and ended under one load; the first step of every turn does not count.

    python bench/contention.py [--stages sft ppo grpo transformers] [--processes 1 2] [--rounds 5] [--json FILE]

If n training threads and k loops share n cores fairly, a step takes (n + k) / n times as long as without loops.
`beside_fair` is the measured ratio divided by this fair ratio.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any

from harness import ROOT, Results, make_parser, read_steps

STAGES = {"sft": "demo/sft", "ppo": "demo/ppo", "grpo": "demo_grpo/grpo"}
LOADS = (0, 1, 2)
"""Numbers of busy loops that run at the same time as the training."""
CORES = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
PATIENCE = 600
"""Seconds after which a missing step is an error."""


class Loops:
    """Busy loops, of which any number can run while the other loops are stopped."""

    def __init__(self, most: int) -> None:
        self._all = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(most)]
        self.run(0)

    def run(self, count: int) -> None:
        """Let `count` loops run, and stop all other loops."""
        for number, loop in enumerate(self._all):
            loop.send_signal(signal.SIGCONT if number < count else signal.SIGSTOP)

    def end(self) -> None:
        """End all loops."""
        for loop in self._all:
            loop.kill()
            loop.wait()


@contextmanager
def training(command: Sequence[str], demo: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a training command while the block runs, then kill the command and its ranks."""
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=demo, stdout=output, stderr=output, start_new_session=True)
    try:
        yield process
    finally:
        # The training may have ended with an error.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def measure(
    command: Sequence[str], run_dir: Path, demo: Path, rounds: int, steps: int
) -> dict[int, list[float]]:
    """Measure the median seconds of a few steps of every turn, by number of busy loops."""
    log = Path(f"{run_dir}.log")
    loops = Loops(max(LOADS))
    found: dict[int, list[float]] = {load: [] for load in LOADS}
    try:
        with training(command, demo, log) as process:

            def wait_for(count: int) -> list[float]:
                end = time.monotonic() + PATIENCE
                while len(seconds := [step["seconds"] for step in read_steps(run_dir)]) < count:
                    if process.poll() is not None or time.monotonic() > end:
                        sys.exit(f"{' '.join(command)}: no step {count}: {log.read_text()[-2000:]}")
                    time.sleep(0.02)
                return seconds

            # The first steps compile kernels.
            wait_for(3)
            for _ in range(rounds):
                for load in LOADS:
                    loops.run(load)
                    # The current step began under the previous load.
                    before = len(read_steps(run_dir)) + 2
                    found[load].append(median(wait_for(before + steps)[before:]))
    finally:
        loops.end()
    return found


def summarise(found: dict[int, list[float]], threads: int) -> dict[str, Any]:
    """Compare every loaded turn with the quiet turn of its round."""
    result: dict[str, Any] = {"quiet_s": round(median(found[0]), 4)}
    for load in LOADS[1:]:
        ratios = [loaded / quiet for loaded, quiet in zip(found[load], found[0], strict=True)]
        fair = max(1.0, (threads + load) / CORES)
        result[f"loops_{load}"] = {
            "beside_quiet": round(median(ratios), 2),
            "range": [round(min(ratios), 2), round(max(ratios), 2)],
            "beside_fair": round(median(ratios) / fair, 2),
        }
    return result


def train_with_transformers(model: Path, texts: Path, metrics: Path) -> None:
    """Fine-tune a model in a plain loop, and write the seconds of every step, until the process is killed."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(CORES)
    tokenizer = AutoTokenizer.from_pretrained(model)
    network = AutoModelForCausalLM.from_pretrained(model)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-6, fused=True)
    records = [json.loads(line) for line in texts.read_text().splitlines()[:2048]]
    tokens = [tokenizer("".join(map(str, record.values())))["input_ids"][:64] for record in records]
    with metrics.open("w", buffering=1) as file:
        for step in range(1 << 30):
            start = time.perf_counter()
            rows = [tokens[(step * 64 + row) % len(tokens)] for row in range(64)]
            width = max(map(len, rows))
            ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
            mask = torch.arange(width) < torch.tensor([len(row) for row in rows])[:, None]
            network(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(~mask, -100)).loss.backward()
            torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            file.write(json.dumps({"kind": "train", "seconds": time.perf_counter() - start}) + "\n")


def list_ways(stages: Sequence[str], processes: Sequence[int]) -> Iterator[tuple[str, str, int]]:
    """List the names, stages and process counts to measure."""
    for stage in stages:
        if stage == "transformers":
            yield stage, stage, 1
        else:
            for count in processes:
                yield f"{stage}, {count} processes" if count > 1 else f"{stage}, 1 process", stage, count


def main() -> None:
    """Measure all stages; print and write seconds and ratios."""
    parser = make_parser(__doc__)
    parser.add_argument(
        "--stages", nargs="+", choices=[*STAGES, "transformers"], default=[*STAGES, "transformers"]
    )
    parser.add_argument("--processes", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="steps that count in a turn")
    parser.add_argument("--demo", type=Path, default=ROOT, help="directory in which the demos were run")
    parser.add_argument("--plain-loop", nargs=3, type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.plain_loop:
        train_with_transformers(*options.plain_loop)
    results = Results(options.json, ("torch", "transformers"))
    for name, stage, count in list_ways(options.stages, options.processes):
        with tempfile.TemporaryDirectory(prefix="realrl-contention-") as scratch:
            run_dir = Path(scratch) / "run"
            if stage == "transformers":
                run_dir.mkdir()
                model = options.demo / "runs/demo/sft/final"
                inputs = [
                    str(model),
                    str(options.demo / "data/demo/sft_train.jsonl"),
                    str(run_dir / "metrics.jsonl"),
                ]
                command = [sys.executable, __file__, "--plain-loop", *inputs]
            else:
                changes = ["training.steps=100000", "evaluation.every=null"]
                changes += [f"cluster=cpu:1x{count}", f"run_dir={run_dir}"]
                recipe = str(ROOT / "recipes" / f"{STAGES[stage]}.yaml")
                command = [sys.executable, "-m", "realrl", "train", recipe, *changes]
            found = measure(command, run_dir, options.demo.resolve(), options.rounds, options.steps)
        result = summarise(found, CORES)
        print(name, result, flush=True)
        results.add(name, {"rounds": options.rounds, "steps": options.steps, **result})


if __name__ == "__main__":
    main()
