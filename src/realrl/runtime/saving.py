"""Saving of a run's models as Hugging Face directories: the final ones, the best ones, and those of checkpoints."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from realrl.algorithms.method import Algorithm
from realrl.program.lower import WRITER
from realrl.recipe.algorithm import get_spec
from realrl.recipe.experiment import Experiment
from realrl.runtime.continuation import gather_algorithm_state
from realrl.runtime.output.rundir import RunDirectory
from realrl.runtime.prepare.compile import Compiled
from realrl.runtime.processes.process import Process
from realrl.runtime.worker.roles import Roles


class ModelSaver:
    """Writer of the trained roles of a run, on every rank."""

    def __init__(
        self,
        experiment: Experiment,
        compiled: Compiled,
        process: Process,
        roles: Roles,
        directory: RunDirectory,
        trained: Sequence[str],
        tokenizer: Any,
        stop_token_ids: tuple[int, ...],
        algorithm: Callable[[], Algorithm],
    ) -> None:
        """`algorithm` gives the one that is used now."""
        self._name, self._compiled, self._process = get_spec(experiment).name, compiled, process
        self._roles, self._directory, self._trained = roles, directory, trained
        self._tokenizer, self._stop_token_ids, self._algorithm = tokenizer, stop_token_ids, algorithm

    def save(self, which: Literal["best"] | None) -> None:
        """Write every trained role: as the best ones, or for None as the final ones.

        The graph's first trained role has the directory's name, others have theirs appended to it. What the
        algorithm has learnt besides, such as the scale of a critic's values, goes into a file beside them.
        """
        with self._process.activity.part("save"):
            for role in self._trained:
                name = "" if role == self._trained[0] else role
                self._save_role(role, self._directory.checkpoint(which, name))
            state = gather_algorithm_state(self._process, self._compiled.train, self._algorithm())
            if self._process.rank == WRITER and state:
                self._directory.write_state(which, self._name, state)

    def export(self, directory: Path) -> None:
        """Write every trained role into a directory, by its name."""
        for role in self._trained:
            self._save_role(role, directory / role)

    def _save_role(self, role: str, path: Path) -> None:
        """Write a role; the first rank of its home does it."""
        if self._process.rank in self._compiled.homes[role].ranks:
            with self._directory.writing(path):
                self._roles.save(role, path, self._tokenizer, self._stop_token_ids)
