"""TensorBoard's files."""

from collections.abc import Mapping
from typing import Any

from realrl.config.yaml_file import dump_yaml
from realrl.runtime.output.trackers.tracker import TrackedRun

BOARD = "tensorboard"
"""Directory of them in that of a run."""


class TensorBoardTracker:
    """Event files for TensorBoard."""

    def __init__(self) -> None:
        self._writer: Any = None
        self._notes = self._last = 0
        self._place = ""

    def open(self, run: TrackedRun) -> None:
        """Start an event file, which replaces the steps of earlier ones that are done again."""
        self._place = str(run.directory / BOARD)
        self._notes = len(run.notes)
        self._start(run.done + 1)
        if not run.done:
            # Indented lines are code.
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
        """Write a text."""
        self._writer.add_text("notes", text, self._notes)
        self._notes += 1

    def close(self, *, done: bool) -> None:
        """Write what is in buffers."""
        self._writer.close()

    def _start(self, purge_step: int) -> None:
        """Start an event file that replaces steps from this one on."""
        from torch.utils.tensorboard.writer import SummaryWriter

        self._writer = SummaryWriter(self._place, purge_step=purge_step)
