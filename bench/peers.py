"""realrl beside TRL: the same models, records, lengths, data type and optimizer, on a CPU.

Each side is a process of its own, with the same number of threads; they take turns, step by step, so that a noisy
machine disturbs both alike. Reported are medians of the seconds of steps, the tokens per second that are no
padding, the peak memory of the process (and what is left of it when Python's imports are taken away), and the
median of the ratios of tokens per second of the turns; also per second of processor time, which other programs
disturb less.

Weights are fresh, words are tokens. Lengths of answers and texts are log-normal, cut at the longest, but those of
GRPO's fixed cases. In GRPO, groups of 8, a sample of a step ends at a length that both sides look up in one table,
by one line in the sampling of each. There is no reference, and the reward is a Python function.

TRL is set up for its own advantage: without activation checkpointing (its default) and logging of text, attention
is SDPA, micro-batches have the size that was fastest of 4 to 64 rows. What its documentation recommends besides,
vLLM, FlashAttention and Liger kernels, needs a GPU. `packed` is its packing of whole texts, whose attention
without FlashAttention is a mask over the packed row; `wrapped` cuts texts and attends across them, so that it needs
no mask, but does not learn the same. realrl's side of these three is the same: it packs always.

    python bench/peers.py [--cases NAME ...] [--rounds 7] [--threads 2] [--trl-batch N] [--json FILE]

Cases that FILE has already are measured again only when they are named. A case takes between 1 and 8 minutes.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from results_file import ResultsFile

sys.path.append(str(Path(__file__).with_name("peer")))
from cases import CASES, DEVICE_VARIABLE

SIDES = ("realrl", "trl")
WARM_UP = 2
"""Steps of each side that are not counted."""


class Side:
    """Process of one side."""

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
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    str(script),
                    case,
                    str(root),
                    str(steps),
                    *([] if trl_batch is None else [str(trl_batch)]),
                ],
                env={**os.environ, **environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self._read()

    def step(self) -> dict[str, Any]:
        """Have it take a step."""
        assert self._process.stdin is not None
        print(file=self._process.stdin, flush=True)
        return self._read()

    def end(self) -> None:
        """End the process, which waits for a turn."""
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
    """Have both sides take their steps in turns."""
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
    """Medians of a side."""
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--trl-batch", type=int, help="rows per micro-batch of TRL, instead of the case's")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results = ResultsFile(arguments.json, ("torch", "transformers", "trl"))
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
