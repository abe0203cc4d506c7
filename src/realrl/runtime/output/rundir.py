"""The run directory: all files that a run writes, and the history of its starts."""

import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from glob import glob
from pathlib import Path
from typing import Any

from realrl.checkpoint.saved import (
    BEST,
    CONFIG,
    METRICS,
    SUMMARY,
    Checkpoint,
    Restored,
    checkpoint_path,
    find_saved,
    list_checkpoints,
    list_records,
    name_state_file,
    remove_partial,
)
from realrl.config.errors import RunError, UserError
from realrl.config.files import (
    as_os_error,
    check_directory,
    make_private,
    partial_path,
    reason_of,
    write_whole,
)
from realrl.config.json_file import parse_rows, read_tail, replace_infinite, write_rows
from realrl.config.paths import local_path
from realrl.config.redaction import redact_code
from realrl.config.user_code import find_source, is_own_module
from realrl.plan.plan import Plan
from realrl.program.instructions import Program
from realrl.program.text import format_program
from realrl.recipe.experiment import Experiment
from realrl.recipe.load import dump_experiment
from realrl.recipe.sources import list_sources
from realrl.runtime.output.algorithm_record import RECORD, AlgorithmRecord
from realrl.runtime.output.lock import LOCK
from realrl.runtime.output.tracker_threads import TRACKED, Trackers, open_trackers
from realrl.runtime.processes.environment import find_job, restart_count

HISTORY = "history.jsonl"
"""Name of the file with one line for each start of the run."""
PLAN, PROGRAMS = "plan.yaml", "programs"
"""Names that every run's directory contains. A directory without them is never deleted."""
CODE = "code"
"""Name of the directory with copies of the code files that the recipe names. The name of a copy is that of its
setting."""
_STARTED = {PROGRAMS, CONFIG, PLAN, CODE, RECORD, HISTORY, "logs", "ranks", *TRACKED}
"""Names of everything that exists before the first step. Runs that ended before that left nothing else."""
BEST_NOTE = f"{BEST}.json"
"""Name of the file about the evaluation that produced the best models."""
EVALUATIONS = "eval"
"""Name of the directory for results of `realrl eval`. It is not part of the run."""


class RunDirectory:
    """The paths and files of a run. Only the rank that writes may call methods that write."""

    def __init__(self, path: str, trained: Sequence[str] = ()) -> None:
        """`trained` are the roles that the run saves."""
        self.path = local_path(path)
        self._trained = trained
        self._metrics = self.path / METRICS
        self._trackers = Trackers()

    def check(self, experiment: Experiment) -> bool:
        """Check that the directory can be used. Returns whether it contains a run.

        The directory must be writable, and must be empty or belong to a run. With `overwrite`, it must not contain
        a model, data or another file that the run reads. Raises UserError if it cannot be used.
        """
        if not self.path.is_file():
            check_directory(f"run_dir={self.path}", self.path)
        if not self.path.exists():
            return False
        if not self.path.is_dir():
            raise UserError(f"run_dir={self.path} is a file; choose a directory")
        names = {entry.name for entry in self._of_run()}
        if names <= _STARTED and (not names or PROGRAMS in names):
            return False
        if not {CONFIG, PLAN, PROGRAMS} <= names:
            raise UserError(f"run_dir={self.path} holds something other than a run; choose another directory")
        if experiment.overwrite:
            self._check_sources(experiment)
        return True

    def _check_sources(self, experiment: Experiment) -> None:
        """Check that the run reads no file in the directory, which will be deleted. Raises UserError if it does."""
        inside = self.path.resolve()
        for name, source in _sources(experiment):
            files = [local_path(file) for file in (source, *glob(str(local_path(source)), recursive=True))]
            if any(file.exists() and file.resolve().is_relative_to(inside) for file in files):
                raise UserError(
                    f"{name}={source} lies in run_dir={self.path}, which overwrite=true would delete;"
                    " choose another run_dir"
                )

    def mark(self) -> tuple[int, int] | None:
        """Return a value that identifies the run in this directory; None without a run.

        A new run in the same directory has another value.
        """
        try:
            status = (self.path / CONFIG).stat()
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns

    def start(
        self,
        experiment: Experiment,
        plan: Plan,
        programs: Mapping[str, Sequence[Program]],
        restored: Restored | None = None,
    ) -> None:
        """Create the directory, and write config, code, plan and programs, before the first step.

        A `restored` run keeps everything that it wrote before its checkpoint. Raises UserError like `check`, and
        also if the directory cannot be written.
        """
        self.check(experiment)
        try:
            if restored is None:
                self._clear()
            else:
                remove_partial(self.path)
                shutil.rmtree(self.path / PROGRAMS, ignore_errors=True)
                self.go_back(restored)
            # Samples, data and weights stay private unless the user decides otherwise.
            make_private(self.path)
            (self.path / PROGRAMS).mkdir(exist_ok=True)
            write_whole(self.path / CONFIG, dump_experiment(experiment))
            AlgorithmRecord.of(experiment.spec, self._trained).save(self.path)
            for setting, file in _find_code(experiment).items():
                (self.path / CODE).mkdir(exist_ok=True)
                code = redact_code(file.read_bytes().decode(errors="surrogateescape"))
                (self.path / CODE / f"{setting}.py").write_bytes(code.encode(errors="surrogateescape"))
            plan.save(self.path / PLAN, experiment.graph)
            for name, ranks in programs.items():
                for program in ranks:
                    file = self.path / PROGRAMS / f"{name}-rank{program.rank}.txt"
                    write_whole(file, format_program(program))
            step = 0 if restored is None else restored.state.step
            add_start(self.path / HISTORY, describe_start(step, str(plan.cluster)))
        except OSError as error:
            raise UserError(f"run_dir={self.path} cannot be written: {reason_of(error)}") from None

    def _clear(self) -> None:
        """Delete the files of an earlier run."""
        for entry in self._of_run():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()

    def go_back(self, restored: Restored) -> None:
        """Restore the directory to its state at a checkpoint, except for files that the run will write again.

        Later checkpoints are unreadable or belong to skipped records, so they are renamed, and so are the recorded
        steps that start from them. Raises OSError.
        """
        starts = {record.path: record.checkpoint for record in list_records(self.path).values()}
        starts |= {path: step for step, path in list_checkpoints(self.path).items()}
        for path, step in starts.items():
            if step > restored.state.step:
                aside = path.with_name(f"unused-{path.name}")
                if aside.exists():
                    shutil.rmtree(aside)
                path.rename(aside)
        (self.path / SUMMARY).unlink(missing_ok=True)
        if self.metrics_bytes > restored.state.metrics_bytes:
            os.truncate(self._metrics, restored.state.metrics_bytes)

    @property
    def metrics_bytes(self) -> int:
        """Size of metrics.jsonl in bytes."""
        return self._metrics.stat().st_size if self._metrics.exists() else 0

    def _of_run(self) -> list[Path]:
        """List the entries of the directory, except its lock and the files of `realrl eval`."""
        entries = self.path.iterdir() if self.path.exists() else ()
        return [entry for entry in entries if entry.name not in (EVALUATIONS, LOCK)]

    def open_trackers(self, experiment: Experiment, say: Callable[[str], None], done: int = 0) -> None:
        """From now on, also send metrics to the recipe's trackers. `done`: number of training steps so far."""
        self._trackers = open_trackers(experiment, self.path, say, done)

    def note(self, text: str) -> None:
        """Send a note to the trackers."""
        self._trackers.note(text)

    def close_trackers(self, *, done: bool) -> None:
        """End the trackers within a time limit. `done`: whether the run has ended well."""
        self._trackers.close(done=done)

    def log(self, step: int, kind: str, seconds: float, metrics: Mapping[str, float]) -> None:
        """Append one line to metrics.jsonl, in which metrics that are not finite become null.

        Raises RunError if the line cannot be written. No part of it then remains in the file.
        """
        line = {
            "step": step,
            "kind": kind,
            "seconds": round(seconds, 4),
            "metrics": replace_infinite(metrics),
        }
        rest = (json.dumps(line) + "\n").encode()
        # Unbuffered, because closing the file after a failed write would try to write the buffer again.
        with self.writing(self._metrics), self._metrics.open("ab", buffering=0) as file:
            end = file.tell()
            try:
                while rest:
                    rest = rest[file.write(rest) :]
            except OSError:
                os.ftruncate(file.fileno(), end)
                raise
        self._trackers.log(step, kind, seconds, metrics)

    def write_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write the samples of an evaluation, one JSON object per line.

        Raises RunError if they cannot be written.
        """
        file = self.path / "samples" / f"step-{step:06}.jsonl"
        with self.writing(file):
            write_rows(file, rows)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write the summary, which marks the run as finished. Raises RunError if it cannot be written."""
        file = self.path / SUMMARY
        with self.writing(file):
            write_whole(file, json.dumps(summary, indent=2) + "\n")

    def write_state(self, which: Checkpoint, algorithm: str, state: Mapping[str, Any]) -> None:
        """Write the state of an algorithm beside saved models. Raises RunError if it cannot be written."""
        file = name_state_file(self.checkpoint(which))
        with self.writing(file):
            write_whole(file, json.dumps({"algorithm": algorithm, "state": state}, indent=2) + "\n")

    def drop_best(self) -> None:
        """Remove the file about the best evaluation. The file must be absent while the best models are replaced."""
        (self.path / BEST_NOTE).unlink(missing_ok=True)

    def write_best(self, best: Mapping[str, Any]) -> None:
        """Write the file about the evaluation that produced the best models.

        Raises RunError if it cannot be written.
        """
        file = self.path / BEST_NOTE
        with self.writing(file):
            write_whole(file, json.dumps(best, indent=2) + "\n")

    def checkpoint(self, which: Checkpoint, role: str = "") -> Path:
        """Return the directory of saved models, see `checkpoint_path`."""
        return checkpoint_path(self.path, which, role)

    @contextmanager
    def writing(self, what: Path) -> Iterator[None]:
        """Turn the operating system's errors in the block into a RunError that names the last checkpoint.

        A partially written file is removed.
        """
        try:
            yield
        except Exception as error:
            shutil.rmtree(partial_path(what), ignore_errors=True)
            refusal = as_os_error(error)
            if refusal is None:
                raise
            saved = find_saved(self.path, self._trained).describe_checkpoint()
            raise RunError(f"{what} cannot be written: {reason_of(refusal)}; {saved}") from error


def _sources(experiment: Experiment) -> Iterator[tuple[str, str]]:
    """List everything that the run reads, as pairs (setting, path). Models may be hub names instead of paths."""
    yield from ((setting, str(file)) for setting, file in _find_code(experiment).items())
    for role in experiment.spec.roles_of(experiment):
        config = getattr(experiment.models, role)
        for field in ("path", "tokenizer"):
            if getattr(config, field) is not None:
                yield f"models.{role}.{field}", getattr(config, field)
    data = experiment.data
    for name, given in (("data.train", data.train), ("data.eval", data.eval)):
        if given is not None:
            yield from ((name, source.path) for source in list_sources(given))
    if experiment.evaluation.against is not None:
        yield "evaluation.against", experiment.evaluation.against
    yield "plan", experiment.plan
    yield "cluster", experiment.cluster
    if experiment.profile is not None:
        yield "profile", experiment.profile


def _find_code(experiment: Experiment) -> dict[str, Path]:
    """Find the files with the user's code, by the names of the settings that refer to them."""
    references: dict[str, str | None] = {
        call.name: call.function
        for call in experiment.graph.functions
        if call.function is not None and not is_own_module(call.function)
    }
    references |= {"algorithm": experiment.algorithm, "evaluation.judge": experiment.evaluation.judge}
    for role in experiment.spec.roles_of(experiment):
        config = getattr(experiment.models, role)
        references[f"models.{role}.family"] = config.shape.family if config.shape else config.family
    # Names of installed algorithms and families contain no dot.
    files = {name: find_source(given) for name, given in references.items() if given and "." in given}
    return {name: file for name, file in files.items() if file is not None}


_MOST = 1 << 22
"""Maximum bytes of the history that are read."""


def describe_start(step: int, cluster: str, **more: Any) -> dict[str, Any]:
    """Create the history entry of a start or restart, before which `step` training steps were finished."""
    now = {"time": round(time.time(), 3), "step": step, "cluster": cluster, "host": socket.gethostname()}
    return now | {"job": find_job(), "restarts": restart_count()} | more


def add_start(file: Path, start: Mapping[str, Any]) -> None:
    """Append an entry to the history of a run. Raises OSError."""
    with file.open("ab", buffering=0) as history:
        history.write((json.dumps(start) + "\n").encode())


def read_history(file: Path) -> list[dict[str, Any]]:
    """Read the history of a run, in order. Incomplete lines are skipped."""
    return list(parse_rows(read_tail(file, _MOST)))
