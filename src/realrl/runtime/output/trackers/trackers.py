"""Trackers of a run. No torch, and no tracker's library before it is asked for."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from realrl.config.errors import UserError
from realrl.recipe.experiment import Experiment
from realrl.recipe.load import dump_settings
from realrl.recipe.sections.trackers import TrackersConfig
from realrl.runtime.output.trackers.background import BackgroundTracker
from realrl.runtime.output.trackers.mlflow import MlflowTracker
from realrl.runtime.output.trackers.tensorboard import BOARD, TensorBoardTracker
from realrl.runtime.output.trackers.tracker import IDS, TrackedRun, Tracker
from realrl.runtime.output.trackers.wandb import WandbTracker
from realrl.runtime.supervision.run_end import read_notes

TRACKED = (IDS, BOARD, "wandb")
"""Directories that trackers make in that of a run."""
HASTE = 1.0
"""Most seconds that a run which failed waits for its trackers: less than its launcher waits for its message."""


class Trackers:
    """All trackers of a run, on the rank that writes. No method raises, or waits for a tracker but `close`."""

    def __init__(
        self,
        trackers: Sequence[BackgroundTracker] = (),
        say: Callable[[str], None] = lambda text: None,
        patience: float = 0.0,
    ) -> None:
        """`say` shows messages to the user; `patience`: seconds that `close` waits."""
        self._trackers, self._say, self._patience = trackers, say, patience

    def log(self, step: int, kind: str, seconds: float, metrics: Mapping[str, float]) -> None:
        """Send the metrics of a training step or an evaluation, `kind`, which took so long."""
        named = {f"{kind}/{name}": value for name, value in metrics.items()}
        for tracker in self._trackers:
            tracker.log(step, {**named, f"{kind}/seconds": seconds})
        self._show_messages()

    def note(self, text: str) -> None:
        """Send a note."""
        for tracker in self._trackers:
            tracker.note(text)

    def close(self, *, done: bool) -> None:
        """End all trackers, and say what they have missed; `done`: whether the run ended well. Again is nothing."""
        deadline = time.monotonic() + (self._patience if done else min(self._patience, HASTE))
        for tracker in self._trackers:
            tracker.begin_closing(done=done)
        for tracker in self._trackers:
            tracker.finish(deadline)
        self._show_messages()
        self._trackers = ()

    def _show_messages(self) -> None:
        for tracker in self._trackers:
            for message in tracker.take_messages():
                self._say(message)


def check_trackers(experiment: Experiment) -> None:
    """Check that the libraries of a recipe's trackers are installed; else UserError."""
    for name in _list_names(experiment.trackers):
        if not _is_installed(name):
            raise UserError(
                f"trackers.{name} needs {name}, which is not installed; run pip install 'realrl[{name}]'"
            )


def open_trackers(
    experiment: Experiment, directory: Path, say: Callable[[str], None], done: int = 0
) -> Trackers:
    """Start the trackers of a recipe, each in a thread; `done` steps were trained before."""
    run = TrackedRun(
        directory=directory, settings=dump_settings(experiment), done=done, notes=read_notes(directory)
    )
    config = experiment.trackers
    made = [BackgroundTracker(f"trackers.{name}", _make(name, config), run) for name in _list_names(config)]
    return Trackers(made, say, config.patience)


def _list_names(config: TrackersConfig) -> Iterator[str]:
    if config.tensorboard or (config.tensorboard is None and _is_installed("tensorboard")):
        yield "tensorboard"
    if config.wandb is not None and config.wandb.mode != "disabled":
        yield "wandb"
    if config.mlflow is not None:
        yield "mlflow"


def _make(name: str, config: TrackersConfig) -> Tracker:
    if config.wandb is not None and name == "wandb":
        return WandbTracker(config.wandb)
    if config.mlflow is not None and name == "mlflow":
        return MlflowTracker(config.mlflow)
    return TensorBoardTracker()


def _is_installed(module: str) -> bool:
    """Tell whether a library is there, and not just a directory of its name, such as the one W&B leaves behind."""
    found = find_spec(module)
    return found is not None and found.origin is not None
