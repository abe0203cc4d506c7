"""Checkpoints and metrics of an unfinished run. No torch."""

import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from realrl.checkpoint.state.manifest import is_checkpoint
from realrl.config.errors import UserError
from realrl.config.files import PARTIAL
from realrl.config.json_file import parse_rows, read_tail

CONFIG, METRICS, CHECKPOINTS, SUMMARY = "config.yaml", "metrics.jsonl", "checkpoints", "summary.json"
_TAIL = 1 << 20
"""Bytes at the end of the metrics that are read for the last step."""
_NAME = r"step-(\d{6,12})"
"""Names of checkpoints."""

BEST: Literal["best"] = "best"
"""Models of the best evaluation, and the start of the names of what lies beside them."""
Checkpoint = int | Literal["best"] | None
"""What is saved: a checkpoint after a step, the models of the best evaluation, or for None the final ones."""


@dataclass(frozen=True)
class Saved:
    """Last checkpoint, saved models of all trained roles, and last step that has metrics."""

    checkpoint: Path | None
    models: Path | None
    metrics: Path
    step: int | None

    def describe_checkpoint(self) -> str:
        """Describe the checkpoint, as part of an error message about a failed write."""
        if self.checkpoint is None:
            return "there is no complete checkpoint"
        return f"the last complete checkpoint is {self.checkpoint}"

    def describe_paths(self) -> str:
        """List the checkpoint and the models, as part of a message; empty where there are none."""
        found = [str(path) for path in (self.checkpoint, self.models) if path is not None]
        return f"saved: {', '.join(found)}" if found else ""

    def describe(self, steps: int | None) -> str:
        """Describe the progress of a run, out of all its steps if those are known, as part of a message."""
        if not self.step:
            return "before the end of the first step; nothing was saved"
        saved = self.describe_paths() or "nothing to continue from was saved yet"
        of = "" if steps is None else f" of {steps}"
        return f"after step {self.step}{of}; {saved}; metrics up to step {self.step} in {self.metrics}"


def checkpoint_path(run_dir: Path, which: Checkpoint, role: str = "") -> Path:
    """Name the directory of a checkpoint, or of saved models.

    The first trained role's models have this name; other roles' have theirs appended to it.
    """
    name = f"{CHECKPOINTS}/step-{which:06}" if isinstance(which, int) else which or "final"
    top = run_dir / name
    return top.with_name(f"{top.name}-{role}") if role else top


def list_checkpoints(run_dir: Path) -> dict[int, Path]:
    """List the whole checkpoints of a run by the training steps before them, the latest one first."""
    found = {}
    for path in (run_dir / CHECKPOINTS).glob("step-*"):
        number = re.fullmatch(_NAME, path.name)
        if number is not None and is_checkpoint(path):
            found[int(number[1])] = path
    return dict(sorted(found.items(), reverse=True))


def find_run_of(path: Path) -> tuple[Path, int | None]:
    """Find the run of a directory: a run's itself, or that of one of its checkpoints, with the steps before it.

    UserError where it is neither.
    """
    number = re.fullmatch(_NAME, path.name)
    if number is not None and path.parent.name == CHECKPOINTS and path.is_dir():
        return path.parent.parent, int(number[1])
    if not (path / CONFIG).is_file():
        raise UserError(f"{path} is no directory of a run, nor a checkpoint of one")
    return path, None


def find_saved(run_dir: Path, trained: Sequence[str]) -> Saved:
    """Find the last checkpoint, models and step in a run's directory, for the roles that it trains."""
    checkpoint = next(iter(list_checkpoints(run_dir).values()), None)
    models = None
    which: tuple[Checkpoint, ...] = (BEST, None)
    for name in which:
        paths = [checkpoint_path(run_dir, name, role) for role in ("", *trained[1:])]
        # A model's directory appears whole or not at all.
        if all(path.is_dir() for path in paths):
            models = paths[0]
    return Saved(checkpoint, models, run_dir / METRICS, _last_step(run_dir / METRICS))


def remove_partial(run_dir: Path) -> None:
    """Remove what a process of the run was writing when it was killed."""
    for path in list(run_dir.rglob(PARTIAL)):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _last_step(metrics: Path) -> int | None:
    steps = [row.get("step") for row in parse_rows(read_tail(metrics, _TAIL))]
    return next((step for step in reversed(steps) if isinstance(step, int)), None)
