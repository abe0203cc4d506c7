"""Write checkpoints while training continues. A thread writes each checkpoint, commits it, and deletes old ones."""

import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from realrl.checkpoint.contents import CheckpointContents, State
from realrl.checkpoint.retention import commit, is_among_best, prune, read_best_metrics, write_metric
from realrl.checkpoint.saved import RunState
from realrl.checkpoint.storage import write_state
from realrl.config.files import partial_path
from realrl.program.lower import WRITER
from realrl.recipe.experiment import Experiment
from realrl.runtime.output.rundir import RunDirectory
from realrl.runtime.processes.process import Process

_PATIENCE = 60.0
"""Maximum seconds that a failing run waits for a checkpoint in progress."""


class Checkpointer:
    """Writes the checkpoints of a run one after another, on every rank.

    A thread of each rank writes straight from the tensors that training uses, without a copy. Call `wait_copied`
    before any of these tensors changes.
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
        """`group` has all ranks. Only the threads that write checkpoints use it.

        `export` writes the trained models into a directory. All ranks call it together.
        """
        self._settings, self._best = experiment.checkpoint, experiment.evaluation.best
        spike = experiment.training.spike
        self._back = None if spike is None else spike.back
        self._process, self._contents, self._directory, self.group = process, contents, directory, group
        self._export = export
        self._thread: threading.Thread | None = None
        self._copied = threading.Event()
        self._failure: BaseException | None = None
        self.last: int | None = None
        """Number of training steps before the last checkpoint, which may still be in progress."""
        self._begun = time.monotonic()

    def is_due(self, step: int) -> bool:
        """Return whether a checkpoint is due after `step` steps. All ranks get the same result."""
        return self._settings.every is not None and step % self._settings.every == 0

    def is_late(self) -> bool:
        """Return whether the last checkpoint is older than `checkpoint.minutes`.

        Ranks may get different results.
        """
        minutes = self._settings.minutes
        return minutes is not None and time.monotonic() - self._begun >= 60 * minutes

    def save(self, state: RunState) -> None:
        """Wait until the previous checkpoint is complete, then begin a new one.

        With `checkpoint.asynchronous`, this returns while a thread still writes the new checkpoint. Otherwise, this
        returns when the new checkpoint is complete.

        Raises RunError if this checkpoint, or the previous one, cannot be written.
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
        """Wait until training may change the tensors of a checkpoint in progress.

        Raises RunError if the checkpoint cannot be written.
        """
        if self._thread is not None:
            self._copied.wait()
            if self._failure is not None:
                self.finish()

    def wait_written(self) -> None:
        """Wait at most `_PATIENCE` seconds for a checkpoint in progress.

        A failing run should not lose this checkpoint, but ranks that are needed to complete it may have failed too.
        """
        if self._thread is not None:
            self._thread.join(_PATIENCE)

    def finish(self) -> None:
        """Wait until the checkpoint is complete. Raises RunError if it cannot be written."""
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
        """Return whether an evaluation with this metric value is among the best, whose checkpoints are kept.

        Only the rank that writes calls this.
        """
        if self._best is None or not self._settings.keep_best:
            return False
        others = read_best_metrics(self._directory.path, self._best)
        return is_among_best(value, others, self._best, self._settings.keep_best)

    def keep_best(self, value: float) -> None:
        """Write the metric value of the last checkpoint's models, so that this checkpoint is kept.

        Raises RunError like `finish`.
        """
        self.finish()
        if self._process.rank == WRITER and self._best is not None and self.last is not None:
            with self._directory.writing(self._directory.checkpoint(self.last)):
                write_metric(self._directory.path, self.last, self._best, value)
                self._prune()

    def _prune(self) -> None:
        prune(self._directory.path, self._settings, self._best, self._back)

    def _write(self, path: Path, tensors: State, state: RunState) -> None:
        """Write a checkpoint and commit it. This runs in the thread."""
        activity = self._process.activity
        activity.phase = f"writing {path.name}"
        try:
            write_state(
                partial_path(path),
                tensors,
                state.to_json(),
                rank=self._process.rank,
                group=self.group,
                copied=self._copied.set,
            )
            if self._process.rank == WRITER:
                commit(path)
                self._prune()
            activity.checkpoint = str(path.relative_to(self._directory.path))
        except BaseException as error:
            self._failure = error
        finally:
            activity.phase = None
            activity.advance()
            self._copied.set()
