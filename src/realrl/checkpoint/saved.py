"""What a run has saved to continue from: checkpoints, models, and the state of the run and its algorithm.

Does not import torch.
"""

import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from realrl.checkpoint.manifest import is_checkpoint
from realrl.config.errors import UserError
from realrl.config.files import PARTIAL
from realrl.config.json_file import parse_rows, read_json, read_tail
from realrl.config.paths import is_local, local_path
from realrl.recipe.experiment import Experiment

CONFIG, METRICS, CHECKPOINTS, SUMMARY = "config.yaml", "metrics.jsonl", "checkpoints", "summary.json"
RECORDS = "records"
"""Name of the directory with recorded steps, see `realrl replay`."""
_TAIL = 1 << 20
"""Bytes read from the end of metrics.jsonl to find the last step."""
_NAME = r"step-(\d{6,12})"
"""Pattern of the names of checkpoints."""

BEST: Literal["best"] = "best"
"""Name of the directory with the models of the best evaluation, and prefix of the names of related files."""
Checkpoint = int | Literal["best"] | None
"""Number of the step after which a checkpoint was saved, "best" for the models of the best evaluation, or None for
the final models."""


@dataclass(frozen=True)
class Saved:
    """What a run has saved: its last checkpoint, models of all trained roles, and the last step with metrics."""

    checkpoint: Path | None
    models: Path | None
    metrics: Path
    step: int | None

    def describe_checkpoint(self) -> str:
        """Write the part of an error message that names the last complete checkpoint."""
        if self.checkpoint is None:
            return "there is no complete checkpoint"
        return f"the last complete checkpoint is {self.checkpoint}"

    def describe_paths(self) -> str:
        """Write the part of a message that names the checkpoint and the models; empty if there are none."""
        found = [str(path) for path in (self.checkpoint, self.models) if path is not None]
        return f"saved: {', '.join(found)}" if found else ""

    def describe(self, steps: int | None) -> str:
        """Write the part of a message that describes the progress of a run.

        `steps` is the run's total number of steps, if known.
        """
        if not self.step:
            return "before the end of the first step; nothing was saved"
        saved = self.describe_paths() or "nothing to continue from was saved yet"
        of = "" if steps is None else f" of {steps}"
        return f"after step {self.step}{of}; {saved}; metrics up to step {self.step} in {self.metrics}"


def checkpoint_path(run_dir: Path, which: Checkpoint, role: str = "") -> Path:
    """Return the directory of a checkpoint, or of saved models.

    `role` is appended to the name of the directory. It is empty for the first trained role.
    """
    name = f"{CHECKPOINTS}/step-{which:06}" if isinstance(which, int) else which or "final"
    top = run_dir / name
    return top.with_name(f"{top.name}-{role}") if role else top


def list_checkpoints(run_dir: Path) -> dict[int, Path]:
    """Find the complete checkpoints of a run, the latest first.

    Keys are the numbers of training steps before each checkpoint.
    """
    found = {}
    for path in (run_dir / CHECKPOINTS).glob("step-*"):
        number = re.fullmatch(_NAME, path.name)
        if number is not None and is_checkpoint(path):
            found[int(number[1])] = path
    return dict(sorted(found.items(), reverse=True))


@dataclass(frozen=True)
class RecordedStep:
    """A step that can be replayed: the directory of its record, and the checkpoint to start from."""

    path: Path
    checkpoint: int
    """Number of training steps before the checkpoint; 0 for the weights that the run started with."""


def record_path(run_dir: Path, step: int, checkpoint: int) -> Path:
    """Return the directory of the record of a step, which is replayed from a checkpoint."""
    return run_dir / RECORDS / f"step-{step:06}-from-{checkpoint:06}"


def list_records(run_dir: Path) -> dict[int, RecordedStep]:
    """Find the recorded steps of a run, in order. Keys are the numbers of steps, counted from 1.

    If a step was recorded several times, the record from the latest checkpoint counts.
    """
    found = {}
    for path in sorted((run_dir / RECORDS).glob("step-*")):
        numbers = re.fullmatch(rf"{_NAME}-from-(\d{{6,12}})", path.name)
        if numbers is not None:
            found[int(numbers[1])] = RecordedStep(path, int(numbers[2]))
    return dict(sorted(found.items()))


def find_run_of(path: Path) -> tuple[Path, int | None]:
    """Find the run directory of a path, which may be the run directory itself or one of its checkpoints.

    Also returns the number of training steps before the checkpoint, or None for a run directory. Raises UserError
    if the path is neither.
    """
    number = re.fullmatch(_NAME, path.name)
    if number is not None and path.parent.name == CHECKPOINTS and path.is_dir():
        return path.parent.parent, int(number[1])
    if not (path / CONFIG).is_file():
        raise UserError(f"{path} is neither a run directory nor a checkpoint")
    return path, None


def find_final_model(given: str) -> str:
    """Return a model directory unchanged; for the directory of a run, return its final model.

    Raises UserError if the run has not saved a final model.
    """
    run_dir = local_path(given)
    if not (run_dir / CONFIG).is_file():
        return given
    final = checkpoint_path(run_dir, None)
    if not final.is_dir():
        raise UserError(
            f"{given} is a run without a final model; `realrl export {given} --out DIR` writes the models of its"
            " last checkpoint"
        )
    return str(final)


def find_saved(run_dir: Path, trained: Sequence[str]) -> Saved:
    """Find what a run has saved. `trained` are the roles that it trains."""
    checkpoint = next(iter(list_checkpoints(run_dir).values()), None)
    models = None
    which: tuple[Checkpoint, ...] = (BEST, None)
    for name in which:
        paths = [checkpoint_path(run_dir, name, role) for role in ("", *trained[1:])]
        # A directory of models gets this name only when it is complete.
        if all(path.is_dir() for path in paths):
            models = paths[0]
    return Saved(checkpoint, models, run_dir / METRICS, _last_step(run_dir / METRICS))


def remove_partial(run_dir: Path) -> None:
    """Remove the incomplete files that killed processes of the run have left."""
    for path in list(run_dir.rglob(PARTIAL)):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _last_step(metrics: Path) -> int | None:
    steps = [row.get("step") for row in parse_rows(read_tail(metrics, _TAIL))]
    return next((step for step in reversed(steps) if isinstance(step, int)), None)


@dataclass(frozen=True)
class RunState:
    """State of a run after a training step, without tensors. It can be written as JSON."""

    step: int
    """Number of finished training steps."""
    taken: int
    """Number of records taken from the data, including records whose samples were replaced."""
    seconds: float
    """Seconds that the run has taken so far, including earlier starts."""
    metrics_bytes: int
    """Size of metrics.jsonl in bytes."""
    evaluated: int | None
    """Number of training steps before the last evaluation; None before the first evaluation."""
    data: Mapping[str, int]
    """Numbers that identify the training data and its order, see `Dataset.identify`."""
    scoring: Mapping[str, int] = field(default_factory=dict)
    """Checksums, by name, of the record fields that scoring functions read and of the files of these functions."""
    algorithm: Mapping[str, Any] = field(default_factory=dict)
    """State of the algorithm."""
    trainers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """State of each trainer, by role."""
    functions: Mapping[str, list[Any]] = field(default_factory=dict)
    """States of stateful functions, by call. A call has one state for each of its output ranks, in their order."""
    best: Mapping[str, Any] | None = None
    """The best evaluation so far, if the recipe keeps one."""
    rollbacks: int = 0
    """Number of times that training has gone back to a checkpoint after a spike."""
    notes: Mapping[str, Any] = field(default_factory=dict)
    """State that determines which notes a resumed run still prints, see `StepNotes.state_dict`."""
    rate_factor: float = 1.0
    """Factor of the learning rates, which callbacks may change."""
    under_way: list[dict[str, Any]] = field(default_factory=list)
    """Batches that were sampled but not trained on yet, in the order of their steps. See `TrainingSteps`."""

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, read: Mapping[str, Any]) -> "RunState":
        """Create the state from JSON values. Raises TypeError if another version of realrl wrote other fields."""
        return cls(**read)


@dataclass(frozen=True)
class Restored:
    """The checkpoint from which a run resumed. `problems` explain why later checkpoints could not be read."""

    path: Path
    state: RunState
    problems: tuple[str, ...]
    rows: dict[int, dict[str, dict[int, Any]]] = field(default_factory=dict)
    """Rows of the batches under way, see `checkpoint.rows`."""


def name_state_file(models: Path) -> Path:
    """Return the algorithm's state file for saved models. `models` is the directory of the first trained role."""
    return models.with_name(f"{models.name}-state.json")


def find_saved_state(experiment: Experiment, trained: Sequence[str]) -> tuple[Path, Mapping[str, Any]] | None:
    """Find the state that the same algorithm saved with the models from which all trained roles start.

    Returns None if the roles start from other models. Raises UserError for a damaged file.
    """
    paths = [getattr(experiment.models, role).path for role in trained]
    if any(path is None or not is_local(path) for path in paths):
        return None
    first = local_path(paths[0])
    beside = [first, *(first.with_name(f"{first.name}-{role}") for role in trained[1:])]
    file = name_state_file(first)
    if beside != [local_path(path) for path in paths] or not file.is_file():
        return None
    saved = read_json(file)
    state, name = saved.get("state"), saved.get("algorithm")
    if not isinstance(state, dict) or not isinstance(name, str):
        raise UserError(f"{file} is damaged: it has no algorithm with its state; delete it to start without")
    return (file, state) if name == experiment.spec.name else None


class _Loading(Protocol):
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def load_saved_state(algorithm: _Loading, file: Path, state: Mapping[str, Any]) -> None:
    """Load the state that `find_saved_state` found. Raises UserError if the algorithm cannot read it."""
    try:
        algorithm.load_state_dict(dict(state))
    except UserError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{file} is damaged: the algorithm cannot read it ({error!r}); delete it to start without"
        ) from None
