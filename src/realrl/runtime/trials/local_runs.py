"""Runs of a recipe under plans, for a few steps on this machine: they leave nothing but their costs. No torch."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from realrl.config.errors import UserError
from realrl.dataflow.graph import DataflowGraph
from realrl.plan.plan import Plan
from realrl.planner.calibration.comparison import Comparison
from realrl.runtime.trials.halving import OutOfTime, TrialFailed

_PATIENCE = 5.0
"""Seconds that a run gets to end once it is interrupted: less than this process itself has."""
_LAST_LINES = 3
"""Lines of output that are quoted of a run which says nothing of why it failed."""
MEASURE_ONLY = (
    "overwrite=true",
    "data.eval=null",
    "evaluation={}",
    "trackers={}",
    "checkpoint={minutes: null, last: false}",
    "training.spike=null",
    "launch.max_restarts=0",
    "launch.shrink=false",
    "launch.grace_seconds=0",
)
"""Overrides of a run that measures steps and keeps nothing."""


class LocalRuns:
    """Runs of a recipe under plans by name, each in a directory of its own below `scratch`."""

    def __init__(
        self,
        arguments: Sequence[str],
        plans: Mapping[str, Plan],
        graph: DataflowGraph,
        *,
        scratch: Path,
        minutes: float,
    ) -> None:
        """`arguments`: recipe and overrides, devices included. `minutes`: time of all runs, from now on."""
        self._arguments = arguments
        self._plans = plans
        self._graph = graph
        self._scratch = scratch
        self._deadline = time.monotonic() + 60 * minutes
        self._number = 0

    def __call__(self, name: str, steps: int) -> Comparison:
        """Train `steps` steps under a plan, after one that warms up, and read what they cost.

        Raises TrialFailed where the run fails, and OutOfTime where it does not end in time.
        """
        self._number += 1
        directory = self._scratch / f"{self._number}"
        directory.mkdir()
        plan = directory / "plan.yaml"
        self._plans[name].save(plan, self._graph)
        run_dir = directory / "run"
        settings = {"run_dir": str(run_dir), "plan": str(plan), "training.steps": steps + 1}
        overrides = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
        self._train([*self._arguments, *MEASURE_ONLY, *overrides], directory / "output.txt")
        try:
            return Comparison.load(run_dir)
        except UserError as error:
            raise TrialFailed(str(error)) from None

    def _train(self, arguments: Sequence[str], output: Path) -> None:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise OutOfTime
        command = [sys.executable, "-m", "realrl", "train", *arguments]
        with output.open("w") as file:
            # In a session of its own, so that Ctrl-C reaches this process alone, which then ends all of the run.
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                status = process.wait(left)
            except subprocess.TimeoutExpired:
                raise OutOfTime from None
            finally:
                _end(process)
        if status:
            raise TrialFailed(_find_reason(output.read_text(errors="replace"), status))


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a run with its ranks, if it has not ended."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _find_reason(output: str, status: int) -> str:
    """Find why a run failed: its error message, else its last lines."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    said = [line.removeprefix("realrl: ") for line in lines if line.startswith("realrl: ")]
    return said[-1] if said else f"exit status {status}: {' / '.join(lines[-_LAST_LINES:])}"
