"""Checkpoints and metrics of an unfinished run. No torch."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from realrl.config.files import PARTIAL

METRICS, CHECKPOINTS = "metrics.jsonl", "checkpoints"

BEST: Literal["best"] = "best"
"""Models of the best evaluation, and the start of the names of what lies beside them."""
Checkpoint = int | Literal["best"] | None
"""Saved models: those after a step, those of the best evaluation, or for None the final ones."""


@dataclass(frozen=True)
class Saved:
    """Last checkpoint with models of all trained roles, and last step that has metrics."""

    checkpoint: Path | None
    metrics: Path
    step: int | None

    def describe_checkpoint(self) -> str:
        """Describe the checkpoint, as part of an error message about a failed write."""
        if self.checkpoint is None:
            return "there is no complete checkpoint"
        return f"the last complete checkpoint is {self.checkpoint}"

    def describe(self, steps: int | None) -> str:
        """Describe the progress of a run, out of all its steps if those are known, as part of a message."""
        if not self.step:
            return "before the end of the first step; nothing was saved"
        models = "no model was saved; training.save_every saves on the way"
        if self.checkpoint is not None:
            models = f"saved: {self.checkpoint}"
        of = "" if steps is None else f" of {steps}"
        return f"after step {self.step}{of}; {models}; metrics up to step {self.step} in {self.metrics}"


def checkpoint_path(run_dir: Path, which: Checkpoint, role: str = "") -> Path:
    """Name the directory of saved models.

    The first trained role's has this name; other roles' have theirs appended to it.
    """
    name = f"{CHECKPOINTS}/step-{which:06}" if isinstance(which, int) else which or "final"
    top = run_dir / name
    return top.with_name(f"{top.name}-{role}") if role else top


def find_saved(run_dir: Path, trained: Sequence[str]) -> Saved:
    """Find the last complete checkpoint and step in a run's directory, for the roles that it trains."""
    steps = [int(path.name[5:]) for path in (run_dir / CHECKPOINTS).glob("step-*") if path.name[5:].isdigit()]
    found = None
    which: tuple[Checkpoint, ...] = (BEST, *sorted(steps), None)
    for checkpoint in which:
        paths = [checkpoint_path(run_dir, checkpoint, role) for role in ("", *trained[1:])]
        # A model's directory appears whole or not at all.
        if all(path.is_dir() for path in paths):
            found = paths[0]
    return Saved(found, run_dir / METRICS, _last_step(run_dir / METRICS))


def remove_partial(run_dir: Path) -> None:
    """Remove what a process of the run was writing when it was killed."""
    for path in list(run_dir.rglob(PARTIAL)):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _last_step(metrics: Path) -> int | None:
    last = None
    if metrics.is_file():
        with metrics.open("rb") as file:
            for line in file:
                last = line if line.endswith(b"\n") else last
    return None if last is None else int(json.loads(last)["step"])
