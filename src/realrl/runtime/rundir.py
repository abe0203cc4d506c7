"""Everything a run writes, in one directory."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from realrl.config.errors import UserError
from realrl.config.experiment import Experiment
from realrl.config.load import dump_experiment
from realrl.plan.plan import Plan
from realrl.program.instructions import Program
from realrl.program.text import format_program

MARK = "config.yaml"
"""The file that shows that a directory is a run's."""


class RunDirectory:
    """Paths of a run, and its writers. Only the rank that writes may open one."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self._metrics = self.path / "metrics.jsonl"
        self._board: Any = None

    def start(self, experiment: Experiment, plan: Plan, programs: Mapping[str, Sequence[Program]]) -> None:
        """Make the directory and write what is known before the first step: config, plan, programs.

        UserError when the directory is in use and the recipe does not say `overwrite`, or is not a run's.
        """
        if self.path.exists() and any(self.path.iterdir()):
            if not (self.path / MARK).is_file():
                raise UserError(
                    f"run_dir={self.path} holds something other than a run; choose another directory"
                )
            if not experiment.overwrite:
                raise UserError(
                    f"run_dir={self.path} holds an earlier run; choose another one or set overwrite=true"
                )
            shutil.rmtree(self.path)
        (self.path / "programs").mkdir(parents=True)
        (self.path / MARK).write_text(dump_experiment(experiment))
        plan.save(self.path / "plan.yaml")
        for name, ranks in programs.items():
            for program in ranks:
                file = self.path / "programs" / f"{name}-rank{program.rank}.txt"
                file.write_text(format_program(program))

    def open_tensorboard(self) -> None:
        """Also write figures for TensorBoard from now on."""
        from torch.utils.tensorboard.writer import SummaryWriter

        self._board = SummaryWriter(str(self.path / "tensorboard"))

    def log(self, step: int, kind: str, seconds: float, figures: Mapping[str, float]) -> None:
        """Append one line to metrics.jsonl; not-a-number and infinite figures become null there."""
        finite = {k: v if abs(v) < float("inf") else None for k, v in figures.items()}
        line = {"step": step, "kind": kind, "seconds": round(seconds, 4), "figures": finite}
        with self._metrics.open("a") as file:
            file.write(json.dumps(line) + "\n")
        if self._board is not None:
            for name, value in figures.items():
                self._board.add_scalar(f"{kind}/{name}", value, step)

    def write_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write what an evaluation generated, one JSON object per line."""
        directory = self.path / "samples"
        directory.mkdir(exist_ok=True)
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (directory / f"step-{step:06}.jsonl").write_text(lines)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write the summary, the sign that the run ended well."""
        (self.path / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        if self._board is not None:
            self._board.close()

    def checkpoint(self, step: int | None) -> Path:
        """The directory of a checkpoint; of the final one for None."""
        return self.path / "final" if step is None else self.path / "checkpoints" / f"step-{step:06}"
