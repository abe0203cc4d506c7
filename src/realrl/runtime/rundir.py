"""Everything a run writes, in one directory."""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from glob import glob
from math import isfinite
from pathlib import Path
from typing import Any

from realrl.config.errors import UserError
from realrl.config.experiment import Experiment
from realrl.config.load import dump_experiment
from realrl.config.paths import local_path
from realrl.plan.plan import Plan
from realrl.program.instructions import Program
from realrl.program.text import format_program

CONFIG, PLAN, PROGRAMS = "config.yaml", "plan.yaml", "programs"
"""What every run's directory has. One without them is somebody else's and never deleted."""


class RunDirectory:
    """Paths of a run, and its writers. Only the rank that writes may open one."""

    def __init__(self, path: str) -> None:
        self.path = local_path(path)
        self._metrics = self.path / "metrics.jsonl"
        self._board: Any = None

    def check(self, experiment: Experiment) -> None:
        """UserError when the directory is in use and the recipe does not say `overwrite`, is not a run's, or
        holds a model, data or another file that the run reads."""
        if not self.path.exists():
            return
        if not self.path.is_dir():
            raise UserError(f"run_dir={self.path} is a file; choose a directory")
        if not any(self.path.iterdir()):
            return
        if not all((self.path / name).exists() for name in (CONFIG, PLAN, PROGRAMS)):
            raise UserError(f"run_dir={self.path} holds something other than a run; choose another directory")
        if not experiment.overwrite:
            raise UserError(
                f"run_dir={self.path} holds an earlier run; choose another one or set overwrite=true"
            )
        inside = self.path.resolve()
        for name, source in _sources(experiment):
            files = [local_path(file) for file in (source, *glob(source, recursive=True))]
            if any(file.exists() and file.resolve().is_relative_to(inside) for file in files):
                raise UserError(
                    f"{name}={source} lies in run_dir={self.path}, which overwrite=true would delete;"
                    " choose another run_dir"
                )

    def start(self, experiment: Experiment, plan: Plan, programs: Mapping[str, Sequence[Program]]) -> None:
        """Make the directory and write what is known before the first step: config, plan, programs.

        UserError as in `check`, and when the directory cannot be written.
        """
        self.check(experiment)
        try:
            if self.path.exists():
                shutil.rmtree(self.path)
            (self.path / PROGRAMS).mkdir(parents=True)
            (self.path / CONFIG).write_text(dump_experiment(experiment), encoding="utf-8")
            plan.save(self.path / PLAN)
            for name, ranks in programs.items():
                for program in ranks:
                    file = self.path / PROGRAMS / f"{name}-rank{program.rank}.txt"
                    file.write_text(format_program(program))
        except OSError as error:
            raise UserError(f"run_dir={self.path} cannot be written: {error.strerror}") from None

    def open_tensorboard(self) -> None:
        """Also write figures for TensorBoard from now on."""
        from torch.utils.tensorboard.writer import SummaryWriter

        self._board = SummaryWriter(str(self.path / "tensorboard"))

    def log(self, step: int, kind: str, seconds: float, figures: Mapping[str, float]) -> None:
        """Append one line to metrics.jsonl; not-a-number and infinite figures become null there."""
        line = {"step": step, "kind": kind, "seconds": round(seconds, 4), "figures": _finite(figures)}
        with self._metrics.open("a") as file:
            file.write(json.dumps(line) + "\n")
        if self._board is not None:
            for name, value in figures.items():
                self._board.add_scalar(f"{kind}/{name}", value, step)

    def write_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write what an evaluation generated, one JSON object per line."""
        directory = self.path / "samples"
        directory.mkdir(exist_ok=True)
        lines = "".join(json.dumps(_finite(row), ensure_ascii=False) + "\n" for row in rows)
        (directory / f"step-{step:06}.jsonl").write_text(lines, encoding="utf-8")

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write the summary, the sign that the run ended well."""
        (self.path / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        if self._board is not None:
            self._board.close()

    def write_state(self, step: int | None, state: Mapping[str, float]) -> None:
        """Write an algorithm's own numbers beside the checkpoint of a step, or the final one."""
        path = self.checkpoint(step)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_name(f"{path.name}-state.json").write_text(json.dumps(state, indent=2) + "\n")

    def checkpoint(self, step: int | None) -> Path:
        """The directory of a checkpoint; of the final one for None."""
        return self.path / "final" if step is None else self.path / "checkpoints" / f"step-{step:06}"


def _sources(experiment: Experiment) -> Iterator[tuple[str, str]]:
    """What the run reads, by the name of its field. Not all are files: models may be on the hub."""
    for role in type(experiment.models).model_fields:
        config = getattr(experiment.models, role)
        for field in ("path", "tokenizer"):
            if getattr(config, field) is not None:
                yield f"models.{role}.{field}", getattr(config, field)
    data, judge = experiment.data, experiment.training.judge
    yield "data.train", data.train
    if data.eval is not None:
        yield "data.eval", data.eval
    if judge is not None:
        yield "training.judge", judge.rpartition(":")[0]
    yield "plan", experiment.plan
    yield "cluster", experiment.cluster
    if experiment.profile is not None:
        yield "profile", experiment.profile


def _finite(values: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers that JSON does not have become null."""
    return {k: None if isinstance(v, float) and not isfinite(v) else v for k, v in values.items()}
