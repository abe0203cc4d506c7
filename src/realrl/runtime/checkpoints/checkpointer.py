"""Checkpointer: writes checkpoints while training goes on, commits them, and deletes old ones."""

import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from realrl.checkpoint.state.pieces import State
from realrl.config.files import partial_path
from realrl.program.lower import WRITER
from realrl.recipe.experiment import Experiment
from realrl.runtime.checkpoints.contents import CheckpointContents
from realrl.runtime.checkpoints.retention import is_among_best, prune, read_best_metrics, write_metric
from realrl.runtime.output.run_state import RunState
from realrl.runtime.output.rundir import RunDirectory
from realrl.runtime.processes.process import Process

_PATIENCE = 60.0
"""Seconds that a run which fails waits for the checkpoint that is being written."""


class Checkpointer:
    """Writer of the checkpoints of a run, one after another, on every rank.

    A checkpoint is written by a thread of each rank, straight from the tensors that training uses. `wait_copied`
    must be called before any of those change; nothing is copied for it.
    """

    def __init__(
        self,
        experiment: Experiment,
        process: Process,
        contents: CheckpointContents,
        directory: RunDirectory,
        group: dist.ProcessGroup | None,
        export: Callable[[Path], None],
    ) -> None:
        """`group` has all ranks, for the threads alone; `export` writes models into a directory, on all ranks."""
        self._settings, self._best = experiment.checkpoint, experiment.evaluation.best
        spike = experiment.training.spike
        self._back = None if spike is None else spike.back
        self._process, self._contents, self._directory, self.group = process, contents, directory, group
        self._export = export
        self._thread: threading.Thread | None = None
        self._copied = threading.Event()
        self._failure: BaseException | None = None
        self.last: int | None = None
        """Training steps before the last checkpoint that was begun."""
        self._begun = time.monotonic()

    def is_due(self, step: int) -> bool:
        """Tell whether a checkpoint belongs after so many steps; the same on every rank."""
        return self._settings.every is not None and step % self._settings.every == 0

    def is_late(self) -> bool:
        """Tell whether the last checkpoint is older than it may be; ranks may disagree."""
        minutes = self._settings.minutes
        return minutes is not None and time.monotonic() - self._begun >= 60 * minutes

    def save(self, state: RunState) -> None:
        """Begin a checkpoint, after the one before has been written whole; all of it unless `asynchronous`.

        RunError where it, or the one before, cannot be written.
        """
        self.finish()
        path = self._directory.checkpoint(state.step)
        partial = partial_path(path)
        with self._process.together(), self._directory.writing(path):
            if self._process.rank == WRITER:
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
        if self._settings.export:
            self._export(partial)
        self._copied.clear()
        self.last, self._begun = state.step, time.monotonic()
        arguments = (path, self._contents.list_saved(), state)
        self._thread = threading.Thread(target=self._write, args=arguments, name="checkpoint", daemon=True)
        self._thread.start()
        if not self._settings.asynchronous:
            self.finish()

    def wait_copied(self) -> None:
        """Wait until tensors may change; RunError where the checkpoint cannot be written."""
        if self._thread is not None:
            self._copied.wait()
            if self._failure is not None:
                self.finish()

    def wait_written(self) -> None:
        """Wait for the checkpoint that is being written, for a while: a run that fails should not lose it, but the
        ranks that it needs may have failed, too."""
        if self._thread is not None:
            self._thread.join(_PATIENCE)

    def finish(self) -> None:
        """Wait until the checkpoint has been written whole; RunError where it cannot be."""
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            assert self.last is not None, "something was written"
            with self._directory.writing(self._directory.checkpoint(self.last)):
                raise failure

    def offers_best(self, value: float) -> bool:
        """Tell whether models so good are among those that are kept as the best ones. Asked on one rank."""
        if self._best is None or not self._settings.keep_best:
            return False
        others = read_best_metrics(self._directory.path, self._best)
        return is_among_best(value, others, self._best, self._settings.keep_best)

    def keep_best(self, value: float) -> None:
        """Note how good the models of the last checkpoint are, so that it is kept. RunError as `finish`."""
        self.finish()
        if self._process.rank == WRITER and self._best is not None and self.last is not None:
            with self._directory.writing(self._directory.checkpoint(self.last)):
                write_metric(self._directory.path, self.last, self._best, value)
                self._prune()

    def _prune(self) -> None:
        prune(self._directory.path, self._settings, self._best, self._back)

    def _write(self, path: Path, tensors: State, state: RunState) -> None:
        """Write a checkpoint and put it in its place: the work of the thread."""
        activity = self._process.activity
        activity.phase = f"writing {path.name}"
        try:
            # Importing it takes a second, which runs without checkpoints need not wait for.
            from realrl.checkpoint.state.writer import write_state

            write_state(
                partial_path(path),
                tensors,
                state.to_json(),
                rank=self._process.rank,
                group=self.group,
                copied=self._copied.set,
            )
            if self._process.rank == WRITER:
                _commit(path)
                self._prune()
            activity.checkpoint = str(path.relative_to(self._directory.path))
        except BaseException as error:
            self._failure = error
        finally:
            activity.phase = None
            activity.advance()
            self._copied.set()


def _commit(path: Path) -> None:
    """Put a complete directory in its place, durably; one that is there is of an earlier attempt."""
    replaced = path.with_name(f".{path.name}.replaced.partial")
    shutil.rmtree(replaced, ignore_errors=True)
    if path.exists():
        path.rename(replaced)
    partial_path(path).rename(path)
    shutil.rmtree(replaced, ignore_errors=True)
    for directory in (path, path.parent):
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
