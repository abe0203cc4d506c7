"""Measure the cost of checkpoints in training steps, and the speed of a checkpoint compared with a plain file.

    make demo                   # models and data of the first case, unless --cases disk
    python bench/checkpoint.py [--cases ppo disk] [--steps N] [--rounds N] [--json FILE]

`ppo` runs the demo's PPO stage with a checkpoint before every other step. It reports the median time of steps
with a checkpoint over the median of steps without, for asynchronous checkpoints and for checkpoints that training
waits for. `control` is the same ratio in a run that writes no checkpoint. `seconds` is the cost of a checkpoint
after correction by `control`.

`disk` writes and reads one gigabyte of tensors as a checkpoint and as one plain file, in turns. Both are
synced to disk. Reads come from the disk if the system drops its cached copy. `peak ratio` is the peak of resident
memory while a checkpoint is written, divided by the resident memory before.
"""

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from harness import ROOT, Results, SilentObserver, list_demo_overrides, make_parser

from realrl.checkpoint.contents import TensorPieces
from realrl.checkpoint.manifest import read_manifest
from realrl.checkpoint.storage import read_state, write_state
from realrl.recipe.load import load_experiment
from realrl.runtime.train import train
from realrl.runtime.training_run import TrainingRun

TENSORS, ELEMENTS = 16, 1 << 24
"""Number of tensors in the gigabyte, and of float32 elements in each tensor."""


class TimedRun(TrainingRun):
    """Run with a checkpoint before every other step. A step's time includes the checkpoint before it."""

    seconds: dict[bool, list[float]]
    writes = True
    """Whether checkpoints are written. A run without checkpoints shows other differences of even and odd steps."""

    def execute(self, started: float) -> None:
        """Train, and collect the seconds of steps separately for steps with and without a checkpoint."""
        type(self).seconds = {True: [], False: []}
        super().execute(started)

    def _train_step(self, step: int) -> dict[str, float]:
        begin = time.perf_counter()
        saves = bool(step % 2)
        if saves and type(self).writes:
            self.continuation.save(step)
        metrics = super()._train_step(step)
        type(self).seconds[saves].append(time.perf_counter() - begin)
        return metrics


def measure_steps(demo: Path, steps: int, *, asynchronous: bool, writes: bool = True) -> dict[str, float]:
    """Time the steps of the demo's PPO stage with and without a checkpoint."""
    TimedRun.writes = writes
    with tempfile.TemporaryDirectory() as scratch:
        changes = [
            f"run_dir={scratch}/run",
            f"training.steps={steps}",
            *list_demo_overrides(demo),
            "cluster=1x1",
            "plan=symmetric",
            "checkpoint.minutes=null",
            f"checkpoint.asynchronous={json.dumps(asynchronous)}",
        ]
        recipe = str(ROOT / "recipes" / "demo" / "ppo.yaml")
        train(load_experiment(recipe, changes), SilentObserver(), TimedRun)
    # The first steps allocate memory.
    with_one, without = (statistics.median(TimedRun.seconds[saves][2:]) for saves in (True, False))
    return {"with": with_one, "without": without, "ratio": with_one / without}


def make_state() -> dict[str, TensorPieces]:
    """Make one gigabyte of tensors."""
    return {
        f"role/parameters/{i}": TensorPieces(
            (4096, ELEMENTS // 4096), torch.float32, {(0, 0): torch.randn(4096, ELEMENTS // 4096)}
        )
        for i in range(TENSORS)
    }


def drop_copies(*files: Path) -> None:
    """Ask the system to drop its cached copies of files."""
    for file in files:
        with suppress(OSError, AttributeError), file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def timed(action: Callable[[], object]) -> float:
    """Measure the seconds of a call."""
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def measure_disk(directory: Path, rounds: int) -> dict[str, float]:
    """Time writing and reading one gigabyte, as a checkpoint and as one file, in turns."""
    state = make_state()
    plain = directory / "plain.bin"
    found: dict[str, list[float]] = {name: [] for name in ("write", "plain write", "read", "plain read")}

    def write_plain() -> None:
        with plain.open("wb", buffering=0) as file:
            for pieces in state.values():
                data = pieces.pieces[0, 0].numpy().reshape(-1).view("uint8").data
                while data:
                    data = data[file.write(data[: 8 << 20]) :]
            os.fsync(file.fileno())

    def read_plain() -> None:
        with plain.open("rb", buffering=0) as file:
            buffer = bytearray(64 << 20)
            while file.readinto(buffer):
                pass

    def write(to: Path) -> None:
        write_state(to, state, {}, rank=0, group=None, copied=lambda: None)

    for number in range(rounds):
        to = directory / str(number)
        to.mkdir()
        found["write"].append(timed(lambda to=to: write(to)))  # type: ignore[misc]
        found["plain write"].append(timed(write_plain))
        drop_copies(plain, *to.iterdir())
        manifest = read_manifest(to)
        found["read"].append(timed(lambda to=to, m=manifest: read_state(to, m, state, group=None)))  # type: ignore[misc]
        found["plain read"].append(timed(read_plain))
        for file in to.iterdir():
            file.unlink()
    medians = {name: statistics.median(values) for name, values in found.items()}
    medians["write ratio"] = medians["write"] / medians["plain write"]
    medians["read ratio"] = medians["read"] / medians["plain read"]
    return medians | measure_peak(directory, state)


def measure_peak(directory: Path, state: dict[str, TensorPieces]) -> dict[str, float]:
    """Measure the peak of resident memory while a checkpoint is written, divided by the resident memory before."""

    def read(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(name))

    to = directory / "peak"
    to.mkdir()
    Path("/proc/self/clear_refs").write_text("5")
    before = read("VmRSS")
    write_state(to, state, {}, rank=0, group=None, copied=lambda: None)
    return {"peak ratio": read("VmHWM") / before}


def main() -> None:
    """Measure the chosen cases."""
    parser = make_parser(__doc__)
    parser.add_argument("--cases", nargs="+", choices=("ppo", "disk"), default=("ppo", "disk"))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--demo", type=Path, default=ROOT, help="directory in which make demo was run")
    parser.add_argument("--directory", type=Path, default=None, help="directory on the disk to measure")
    arguments = parser.parse_args()
    results = Results(arguments.json)
    found: dict[str, Any] = {}
    if "ppo" in arguments.cases:
        demo, steps = arguments.demo.resolve(), arguments.steps
        control = measure_steps(demo, steps, asynchronous=True, writes=False)
        for asynchronous in (True, False):
            name = "ppo asynchronous" if asynchronous else "ppo waiting"
            figures = measure_steps(demo, steps, asynchronous=asynchronous)
            # Even and odd steps differ anyway, because they generate different answers.
            expected = figures["without"] * control["ratio"]
            found[name] = {**figures, "control": control["ratio"], "seconds": figures["with"] - expected}
    if "disk" in arguments.cases:
        with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
            found["disk"] = measure_disk(Path(directory), arguments.rounds)
    for name, figures in found.items():
        results.add(name, figures)
        print(name, {key: round(value, 3) for key, value in figures.items()})


if __name__ == "__main__":
    main()
