"""What the benches share: command-line arguments, a file of results, and runs of the `realrl` command."""

import argparse
import json
import os
import platform
import subprocess
import sys
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from realrl.runtime.observer import Wishes

if TYPE_CHECKING:
    from realrl.runtime.observer import MetricsRecord

ROOT = Path(__file__).resolve().parents[1]
"""The repository. `make demo` and `make demo-grpo` write their data and models here by default."""


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """Make a parser with the option that every bench has."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="file for the results")
    return parser


class Results:
    """Results by name of case, each with its date and machine. Without a path they stay in memory.

    A bench writes after every case, so that it can be run in pieces.
    """

    def __init__(self, path: Path | None, packages: tuple[str, ...] = ("torch",)) -> None:
        self._path = path
        self._about = {
            "date": date.today().isoformat(),
            "machine": f"{read_processor_name()}, {os.cpu_count()} cores",
            **{package: version(package) for package in packages},
        }
        exists = path is not None and path.exists()
        self.cases: dict[str, Any] = json.loads(path.read_text()) if path is not None and exists else {}

    def add(self, case: str, result: dict[str, Any]) -> None:
        """Store the result of a case; an older result of the same case is replaced."""
        self.cases[case] = {**result, "about": self._about}
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps(self.cases, indent=1) + "\n")


def read_processor_name() -> str:
    """Read the processor's name from /proc, or ask the platform."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def realrl(*arguments: object) -> None:
    """Run `realrl ARGUMENTS`. The output is shown only if the command fails."""
    command = [sys.executable, "-m", "realrl", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout}\n{done.stderr}")


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Read the complete lines of a JSON-lines file, which may still be growing."""
    return [json.loads(line) for line in file.read_text().rpartition("\n")[0].splitlines()]


def read_steps(run_dir: Path) -> list[dict[str, Any]]:
    """Read the metrics of the finished training steps of a run."""
    file = run_dir / "metrics.jsonl"
    return [line for line in read_lines(file) if line["kind"] == "train"] if file.exists() else []


def list_demo_overrides(demo: Path) -> list[str]:
    """List overrides of the demo's PPO recipe: the files of a finished `make demo`, and no evaluation."""
    demo = demo.resolve()
    return [
        "data.eval=null",
        "evaluation.judge=null",
        f"data.train={demo}/data/demo/prompts_train.jsonl",
        f"models.actor.path={demo}/runs/demo/sft/final",
        f"models.reward.path={demo}/runs/demo/reward/final",
    ]


class SilentObserver:
    """Observer of a run that ignores everything."""

    def __init__(self) -> None:
        self.wishes = Wishes()

    def begin(self, experiment: object, steps: int) -> None:
        """Ignore the beginning."""

    def note(self, text: str) -> None:
        """Ignore a note."""

    def record(self, record: "MetricsRecord") -> None:
        """Ignore a record."""

    def costs(self, comparison: object) -> None:
        """Ignore the costs."""

    def end(self, run_dir: str, seconds: float) -> None:
        """Ignore the end."""
