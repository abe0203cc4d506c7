"""TensorBoard, Weights & Biases and MLflow as trackers of a run.

Their libraries are imported when a run opens its trackers.
"""

import json
import logging
import re
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from realrl.config.files import write_whole
from realrl.config.redaction import redact_settings
from realrl.config.yaml_file import dump_yaml
from realrl.recipe.run_settings import MlflowConfig, WandbConfig

IDS = "trackers"
"""Name of the directory with the ids that trackers give to a run."""


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """A run as trackers see it, without secrets."""

    directory: Path
    settings: Mapping[str, Any]
    """Nested settings of the recipe."""
    done: int = 0
    """Number of training steps before this start. It is above 0 if the run is resumed."""
    notes: Sequence[str] = ()
    """Notes of earlier starts of the run."""

    @property
    def name(self) -> str:
        """Default name of the run."""
        return self.directory.resolve().name

    def load_id(self, tracker: str) -> str | None:
        """Return the id that a tracker gave to this run at an earlier start; None if there is no id."""
        try:
            found = json.loads(self._file(tracker).read_text(encoding="utf-8"))["id"]
        except (OSError, ValueError, LookupError, TypeError):
            return None
        return found if isinstance(found, str) else None

    def save_id(self, tracker: str, name: str) -> None:
        """Save the id that a tracker gave to this run, so that a later start can use it. Raises OSError."""
        write_whole(self._file(tracker), json.dumps({"id": name}) + "\n")

    def _file(self, tracker: str) -> Path:
        return self.directory / IDS / f"{tracker}.json"


class Tracker(Protocol):
    """A receiver of metrics. Its methods are called in a separate thread, and may raise any exception or hang."""

    def open(self, run: TrackedRun) -> None:
        """Begin or resume a run. This is called again after a failure."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Receive metrics after `step` steps. Names are, for example, `train/actor.train/loss`.

        If a run resumes or goes back, the steps after its checkpoint are logged again.
        """

    def note(self, text: str) -> None:
        """Receive a note."""

    def close(self, *, done: bool) -> None:
        """End the tracker's run. `done`: whether training has ended well."""


MLFLOW = "mlflow"
_MLFLOW_PARAMETERS, _MLFLOW_VALUE, _MLFLOW_NOTES = 100, 500, 5000
"""Limits that hold for every server: parameters in a request, characters of a value, and characters of notes."""


class MlflowTracker:
    """Sends metrics and notes to a run of MLflow."""

    def __init__(self, config: MlflowConfig) -> None:
        self._config = config
        self._client: Any = None
        self._id = ""
        self._notes: list[str] = []
        self._parameters: list[tuple[str, str]] = []
        """Settings of a new run that have not been sent yet."""

    def open(self, run: TrackedRun) -> None:
        """Begin a run, or resume it."""
        from mlflow import MlflowClient

        # At its default level, MLflow logs every change of its database tables.
        logging.getLogger(MLFLOW).setLevel(logging.WARNING)
        self._client = MlflowClient(tracking_uri=self._config.tracking_uri)
        self._notes = list(run.notes)  # a new note replaces the whole text
        known = run.load_id(MLFLOW)
        if known is not None and self._is_there(known):
            self._id = known
            self._client.update_run(known, status="RUNNING")
        else:
            self._id = self._create(run)
            self._parameters = list(_flatten(run.settings))
            run.save_id(MLFLOW, self._id)
        self._send_parameters()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the metrics of a step in one request."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        found = [Metric(_rename(name), value, now, step) for name, value in metrics.items()]
        self._client.log_batch(self._id, metrics=found)

    def note(self, text: str) -> None:
        """Add a note as a line to the description of the run."""
        self._notes.append(text)
        self._client.set_tag(self._id, "mlflow.note.content", "\n\n".join(self._notes)[-_MLFLOW_NOTES:])

    def close(self, *, done: bool) -> None:
        """Set the status of the run."""
        self._client.set_terminated(self._id, "FINISHED" if done else "FAILED")

    def _is_there(self, name: str) -> bool:
        from mlflow.exceptions import MlflowException

        try:
            self._client.get_run(name)
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":  # on another server, or deleted
                return False
            raise
        return True

    def _create(self, run: TrackedRun) -> str:
        config, client = self._config, self._client
        experiment = client.get_experiment_by_name(config.experiment)
        where = (
            client.create_experiment(config.experiment) if experiment is None else experiment.experiment_id
        )
        tags = redact_settings(config.tags)
        made = client.create_run(where, run_name=config.run_name or run.name, tags=tags)
        name: str = made.info.run_id
        return name

    def _send_parameters(self) -> None:
        """Send settings. After a failure, the remaining settings are sent when the run is opened again."""
        from mlflow.entities import Param

        while self._parameters:
            some = [Param(key, value[:_MLFLOW_VALUE]) for key, value in self._parameters[:_MLFLOW_PARAMETERS]]
            self._client.log_batch(self._id, params=some)
            del self._parameters[:_MLFLOW_PARAMETERS]


def _rename(name: str) -> str:
    """Replace characters that MLflow does not allow in names, as in `pass@8`."""
    return re.sub(r"[^\w\-. /]", "_", name)


def _flatten(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the settings that are not null, as pairs (dotted name, value)."""
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{prefix}{_rename(str(key))}.")
        elif value is not None:
            yield prefix + _rename(str(key)), str(value)


BOARD = "tensorboard"
"""Name of the directory in a run's directory for TensorBoard's files."""


class TensorBoardTracker:
    """Writes event files for TensorBoard."""

    def __init__(self) -> None:
        self._writer: Any = None
        self._notes = self._last = 0
        self._place = ""

    def open(self, run: TrackedRun) -> None:
        """Start an event file, which replaces later steps in older files."""
        self._place = str(run.directory / BOARD)
        self._notes = len(run.notes)
        self._start(run.done + 1)
        if not run.done:
            # TensorBoard shows indented lines as code.
            text = "".join(f"    {line}\n" for line in dump_yaml(dict(run.settings)).splitlines())
            self._writer.add_text("recipe", text)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write a scalar for each metric."""
        if step < self._last:  # training has gone back
            self._writer.close()
            self._start(step)
        self._last = step
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def note(self, text: str) -> None:
        """Write a note as text."""
        self._writer.add_text("notes", text, self._notes)
        self._notes += 1

    def close(self, *, done: bool) -> None:
        """Flush and close the file."""
        self._writer.close()

    def _start(self, purge_step: int) -> None:
        """Start an event file that replaces all steps from `purge_step` on in older files."""
        from torch.utils.tensorboard.writer import SummaryWriter

        self._writer = SummaryWriter(self._place, purge_step=purge_step)


WANDB = "wandb"
STEP = "step"
"""Metric on the x axis. W&B's own step can only rise, so it would lose repeated steps."""


class WandbTracker:
    """Sends metrics and notes to a run of Weights & Biases."""

    def __init__(self, config: WandbConfig) -> None:
        self._config = config
        self._run: Any = None
        self._notes: list[str] = []

    def open(self, run: TrackedRun) -> None:
        """Begin a run, or resume it."""
        import wandb

        config = self._config
        name = run.load_id(WANDB)
        if name is None:
            name = uuid.uuid4().hex[:12]
            run.save_id(WANDB, name)
        # Do not send the command line, output, source files or git data, because they may contain secrets.
        # `silent` also keeps W&B from asking for a key.
        settings = wandb.Settings(
            console="off", disable_git=True, save_code=False, silent=True, x_disable_meta=True
        )
        self._run = wandb.init(
            project=config.project,
            entity=config.entity,
            name=config.name or run.name,
            group=config.group,
            tags=redact_settings(config.tags),
            mode=config.mode,
            id=name,
            resume="allow",
            dir=str(run.directory),
            config=dict(run.settings),
            allow_val_change=True,
            settings=settings,
        )
        self._run.define_metric(STEP, hidden=True)
        self._run.define_metric("*", step_metric=STEP)
        self._notes = list(run.notes)  # a new note replaces the whole text

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the metrics of a step as one row."""
        self._run.log({STEP: step, **metrics})

    def note(self, text: str) -> None:
        """Add a note as a line to the notes of the run."""
        self._notes.append(text)
        self._run.notes = "\n".join(self._notes)

    def close(self, *, done: bool) -> None:
        """Wait until everything is sent."""
        self._run.finish(exit_code=0 if done else 1)
