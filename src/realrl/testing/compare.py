"""Compare a run with another run of the same recipe."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from realrl.checkpoint.saved import METRICS
from realrl.runtime.measure.metric_names import PERFORMANCE


class CheckFailure(AssertionError):
    """An algorithm failed a check.

    The message names the plan, and the metric that differs with both of its values.
    """


ABSOLUTE = 0.1
"""Absolute tolerance of metrics near 0, as a multiple of the relative tolerance."""


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Read the lines of metrics.jsonl, without performance metrics."""
    lines = [json.loads(line) for line in (run_dir / METRICS).read_text().splitlines()]
    return [{**line, "metrics": _learnt(line["metrics"])} for line in lines]


def _learnt(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.startswith(PERFORMANCE)}


def compare_runs(run: Path, reference: Path, *, name: str, than: str, tolerance: float) -> None:
    """Compare the metrics of every step and the saved state of a run with those of another run.

    Raises CheckFailure if they differ. Its message calls the two runs `name` and `than`.
    """
    for ours, theirs in zip(read_metrics(run), read_metrics(reference), strict=True):
        step = ours["step"]
        where = f"{name}: step {step}" if ours["kind"] == "train" else f"{name}: evaluation after step {step}"
        _compare(ours["metrics"], theirs["metrics"], where, than, tolerance)
    state, other = (_read_state(directory) for directory in (run, reference))
    _compare(state, other, f"{name}: state_dict after the last step", than, tolerance)


def _read_state(run_dir: Path) -> Mapping[str, float]:
    file = run_dir / "final-state.json"
    return json.loads(file.read_text())["state"] if file.exists() else {}


def _compare(
    ours: Mapping[str, float], theirs: Mapping[str, float], where: str, than: str, tolerance: float
) -> None:
    for key in theirs:
        if key not in ours:
            raise CheckFailure(f"{where}: {key} is missing; it exists {than}")
    for key, value in ours.items():
        if key not in theirs:
            raise CheckFailure(f"{where}: {key} exists; it is missing {than}")
        if not _are_close(value, theirs[key], tolerance):
            raise CheckFailure(
                f"{where}: {key} is {value:.6g}; {than} it is {theirs[key]:.6g} (tolerance {tolerance:g})"
            )


def _are_close(value: float, other: float, tolerance: float) -> bool:
    if value is None or other is None or math.isnan(value) or math.isnan(other):
        return str(value) == str(other)
    return math.isclose(value, other, rel_tol=tolerance, abs_tol=ABSOLUTE * tolerance)
