"""Compare realrl with TRL: the same models, records, lengths, data type and optimizer, on a CPU.

Each side is a process with the same number of threads. The two take turns, step by step, so that a noisy machine
disturbs both alike. The table has medians over the turns: seconds of a step, tokens per second without padding,
peak memory of the process beyond its imports, and the ratio of tokens per second. A second ratio uses seconds of
processor time, which other programs disturb less.

Weights are random, and every word is a token. Lengths of answers and texts are log-normal with a maximum, except in
GRPO's fixed cases. GRPO has groups of 8, no reference and a Python function as reward. Both sides look up the
length of each sample in the same table. One line in the sampling of each side enforces this length.

TRL is set up for its own advantage: no activation checkpointing, no logging of text, SDPA attention, and the
micro-batch that was fastest of 4 to 64 rows. Its documentation also recommends vLLM, FlashAttention and Liger
kernels, which need a GPU. In `packed` cases, TRL packs whole texts, and without FlashAttention it masks attention
between them. In `wrapped` cases, TRL cuts texts and attends across them, so it needs no mask but optimises another
loss. realrl always packs, so its side of `padded`, `packed` and `wrapped` cases is the same.

    python bench/peers.py [--cases NAME ...] [--rounds 7] [--threads 2] [--trl-batch N] [--json FILE]

Cases that FILE already holds are measured again only if they are named. A case takes 1 to 8 minutes.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness import Results, make_parser

sys.path.append(str(Path(__file__).with_name("peer")))
from cases import CASES, DEVICE_VARIABLE

SIDES = ("realrl", "trl")
WARM_UP = 2
"""Steps of each side that are not counted."""


class Side:
    """Process of one side. It waits for its turn before every step."""

    def __init__(
        self, side: str, case: str, root: Path, steps: int, threads: int, trl_batch: int | None, device: str
    ) -> None:
        root.mkdir()
        self._log = root / "log"
        script = Path(__file__).with_name("peer") / f"{side}_side.py"
        environment = {
            "OMP_NUM_THREADS": str(threads),
            "HF_HUB_OFFLINE": "1",
            "KINETO_LOG_LEVEL": "6",
            DEVICE_VARIABLE: device,
        }
        with self._log.open("w") as log:
            arguments = [case, root, steps, *([] if trl_batch is None else [trl_batch])]
            self._process = subprocess.Popen(
                [sys.executable, str(script), *map(str, arguments)],
                env={**os.environ, **environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self._read()

    def step(self) -> dict[str, Any]:
        """Let the process take a step."""
        assert self._process.stdin is not None
        print(file=self._process.stdin, flush=True)
        return self._read()

    def end(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.wait()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"{' '.join(map(str, self._process.args))} ended:\n{self._log.read_text()[-4000:]}")
        return json.loads(line)


def compare(
    name: str, rounds: int, threads: int, trl_batch: int | None = None, device: str = "cpu"
) -> dict[str, Any]:
    """Let both sides take their steps in turns."""
    steps = WARM_UP + rounds + 1
    with tempfile.TemporaryDirectory() as scratch:
        sides = {
            side: Side(side, name, Path(scratch) / side, steps, threads, trl_batch, device) for side in SIDES
        }
        turns: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
        for number in range(WARM_UP + rounds):
            for side in SIDES if number % 2 else reversed(SIDES):
                turns[side].append(sides[side].step())
        for side in sides.values():
            side.end()
    counted = {side: turns[side][WARM_UP:] for side in SIDES}
    wall, processor = divide_rates(counted, "seconds"), divide_rates(counted, "processor")
    return {
        "threads": threads,
        "ratio": round(statistics.median(wall), 2),
        "ratio_range": [round(min(wall), 2), round(max(wall), 2)],
        "processor_ratio": round(statistics.median(processor), 2),
        **{side: summarise(counted[side]) for side in SIDES},
    }


def divide_rates(turns: dict[str, list[dict[str, Any]]], clock: str) -> list[float]:
    """Divide realrl's tokens per second by TRL's, turn by turn."""
    rates = {side: [turn["tokens"] / turn[clock] for turn in turns[side]] for side in SIDES}
    return [ours / theirs for ours, theirs in zip(rates["realrl"], rates["trl"], strict=True)]


def summarise(turns: list[dict[str, Any]]) -> dict[str, Any]:
    """Compute the medians of a side."""
    peak, imported = turns[-1]["peak"], turns[-1]["imported"]
    return {
        "seconds": round(statistics.median(turn["seconds"] for turn in turns), 4),
        "processor_seconds": round(statistics.median(turn["processor"] for turn in turns), 4),
        "tokens_per_second": round(statistics.median(turn["tokens"] / turn["seconds"] for turn in turns)),
        "peak_mib": round(peak / 2**20),
        "peak_above_imports_mib": round((peak - imported) / 2**20),
        "turns": [round(turn["seconds"], 4) for turn in turns],
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--cases", nargs="+", choices=CASES)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--trl-batch", type=int, help="rows of a micro-batch of TRL; default: the case's")
    arguments = parser.parse_args()
    results = Results(arguments.json, ("torch", "transformers", "trl"))
    print(
        f"{'case':16} {'s':>8} {'TRL':>8} {'tokens/s':>9} {'TRL':>8} {'MiB':>6} {'TRL':>6} {'ratio':>6} {'CPU':>6}"
    )
    for name in arguments.cases or [name for name in CASES if name not in results.cases]:
        found = compare(name, arguments.rounds, arguments.threads, arguments.trl_batch)
        results.add(name, found)
        ours, theirs = found["realrl"], found["trl"]
        print(
            f"{name:16} {ours['seconds']:8.3f} {theirs['seconds']:8.3f} {ours['tokens_per_second']:9}"
            f" {theirs['tokens_per_second']:8} {ours['peak_above_imports_mib']:6}"
            f" {theirs['peak_above_imports_mib']:6} {found['ratio']:6.2f} {found['processor_ratio']:6.2f}"
            f" {found['ratio_range']}",
            flush=True,
        )


if __name__ == "__main__":
    main()
