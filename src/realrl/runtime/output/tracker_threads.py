"""Run each tracker in its own thread, so that no tracker can stop or delay the run. Does not import torch."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from realrl.config.errors import UserError
from realrl.config.redaction import redact
from realrl.recipe.experiment import Experiment
from realrl.recipe.load import dump_settings
from realrl.recipe.run_settings import TrackersConfig
from realrl.runtime.output.trackers import (
    BOARD,
    IDS,
    MlflowTracker,
    TensorBoardTracker,
    TrackedRun,
    Tracker,
    WandbTracker,
)
from realrl.runtime.processes.environment import ABANDONED
from realrl.runtime.supervision.run_end import read_notes

CAPACITY = 1000
"""Maximum number of waiting records. Further records replace the oldest ones."""
TRIES = 3
"""Maximum number of tries for each record."""
PAUSE, LONGEST_PAUSE = 1.0, 60.0
"""Seconds of the first pause between two tries, and of the longest. Each consecutive failure doubles the pause."""
_LONG = 300
"""Maximum characters of a tracker's error message."""


@dataclass(frozen=True)
class _Record:
    """The metrics of a step, or the text of a note."""

    step: int = 0
    metrics: Mapping[str, float] | None = None
    text: str = ""

    def deliver(self, tracker: Tracker) -> None:
        if self.metrics is None:
            tracker.note(self.text)
        else:
            tracker.log(self.step, self.metrics)


class BackgroundTracker:
    """A tracker in its own thread. Methods never raise, and all except `finish` return at once."""

    def __init__(self, name: str, tracker: Tracker, run: TrackedRun, capacity: int = CAPACITY) -> None:
        self._name, self._tracker, self._run = name, tracker, run
        self._waiting: deque[_Record] = deque()
        self._capacity = capacity
        self._changed = threading.Condition()
        self._closing: bool | None = None
        """Whether the run has ended well; None while it runs."""
        self._logged = self._delivered = 0
        self._messages: deque[str] = deque()
        self._said: set[str] = set()
        self._opened, self._pause = False, PAUSE
        self._thread = threading.Thread(target=self._work, name=f"{ABANDONED}-{name}", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Queue the metrics of a step."""
        self._logged += 1
        self._put(_Record(step, dict(metrics)))

    def note(self, text: str) -> None:
        """Queue a note."""
        self._put(_Record(text=redact(text)))

    def take_messages(self) -> list[str]:
        """Return the messages for the user, and forget them."""
        return [self._messages.popleft() for _ in range(len(self._messages))]

    def begin_closing(self, *, done: bool) -> None:
        """Let the tracker end when its queue is empty. `done`: whether the run has ended well."""
        with self._changed:
            self._closing = done
            self._changed.notify_all()

    def finish(self, deadline: float) -> None:
        """Wait for the tracker until the deadline on the monotonic clock, and report undelivered records."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        late = ""
        if self._thread.is_alive():
            late = " had not ended in time (trackers.patience)"
        missing = self._logged - self._delivered
        if missing:
            late += f"{' and' if late else ''} misses {missing} of {self._logged} records"
        if late:
            self._messages.append(f"{self._name}{late}; metrics.jsonl has them all")

    def _put(self, record: _Record) -> None:
        with self._changed:
            if len(self._waiting) >= self._capacity:
                self._waiting.popleft()
                self._say(
                    "slow",
                    f"is slower than the run: more than {self._capacity} records wait, and the oldest are dropped",
                )
            self._waiting.append(record)
            self._changed.notify_all()

    def _work(self) -> None:
        while (record := self._take()) is not None:
            if self._try_repeatedly(record) and record.metrics is not None:
                self._delivered += 1
        if self._opened:
            self._try(lambda: self._tracker.close(done=bool(self._closing)))

    def _take(self) -> _Record | None:
        """Wait for a record; None at the end of the run."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closing is not None)
            return self._waiting.popleft() if self._waiting else None

    def _try_repeatedly(self, record: _Record) -> bool:
        for _ in range(TRIES):
            if self._try(lambda: self._deliver(record)):
                self._pause = PAUSE
                return True
            with self._changed:
                if self._changed.wait_for(lambda: self._closing is not None, self._pause):
                    return False  # at the end of the run, each record gets one try
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
        return False

    def _deliver(self, record: _Record) -> None:
        if not self._opened:
            self._tracker.open(self._run)
            self._opened = True
        record.deliver(self._tracker)

    def _try(self, action: Callable[[], None]) -> bool:
        try:
            action()
        except BaseException as error:  # libraries may also raise SystemExit or KeyboardInterrupt
            text = " ".join(redact(str(error)).split())
            self._say(
                "failed", f"fails: {type(error).__name__}: {text[:_LONG]}; the run continues without it"
            )
            return False
        return True

    def _say(self, kind: str, text: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            self._messages.append(f"{self._name} {text}")


TRACKED = (IDS, BOARD, "wandb")
"""Names of the directories that trackers create in a run's directory."""
HASTE = 1.0
"""Maximum seconds that a failed run waits for its trackers. The launcher waits longer than this for the run's error
message."""


class Trackers:
    """All trackers of a run, on the rank that writes. No method raises, and only `close` waits."""

    def __init__(
        self,
        trackers: Sequence[BackgroundTracker] = (),
        say: Callable[[str], None] = lambda text: None,
        patience: float = 0.0,
    ) -> None:
        """`say` shows messages to the user. `close` waits at most `patience` seconds."""
        self._trackers, self._say, self._patience = trackers, say, patience

    def log(self, step: int, kind: str, seconds: float, metrics: Mapping[str, float]) -> None:
        """Send the metrics of a training step or an evaluation. `kind` is `train` or `eval`."""
        named = {f"{kind}/{name}": value for name, value in metrics.items()}
        for tracker in self._trackers:
            tracker.log(step, {**named, f"{kind}/seconds": seconds})
        self._show_messages()

    def note(self, text: str) -> None:
        """Send a note to all trackers."""
        for tracker in self._trackers:
            tracker.note(text)

    def close(self, *, done: bool) -> None:
        """End all trackers, and report records that were not delivered. `done`: whether the run has ended well.

        Further calls do nothing.
        """
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
    """Check that the libraries of a recipe's trackers are installed. Raises UserError if not."""
    for name in _list_names(experiment.trackers):
        if not _is_installed(name):
            raise UserError(
                f"trackers.{name} needs {name}, which is not installed; run pip install 'realrl[{name}]'"
            )


def open_trackers(
    experiment: Experiment, directory: Path, say: Callable[[str], None], done: int = 0
) -> Trackers:
    """Start the trackers of a recipe, each in a thread. `done`: number of training steps before this start."""
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
    """Return whether a library is installed. A directory with its name, which W&B leaves behind, does not count."""
    found = find_spec(module)
    return found is not None and found.origin is not None
