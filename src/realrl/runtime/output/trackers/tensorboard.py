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
        self._notes = 0

    def open(self, run: TrackedRun) -> None:
        """Start an event file, which replaces the steps of earlier ones that are done again."""
        from torch.utils.tensorboard.writer import SummaryWriter

        purge_step = run.done + 1 if run.done else None
        self._writer = SummaryWriter(str(run.directory / BOARD), purge_step=purge_step)
        if not run.done:
            # Indented lines are code.
            text = "".join(f"    {line}\n" for line in dump_yaml(dict(run.settings)).splitlines())
            self._writer.add_text("recipe", text)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write a scalar for each metric."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def note(self, text: str) -> None:
        """Write a text."""
        self._writer.add_text("notes", text, self._notes)
        self._notes += 1

    def close(self, *, done: bool) -> None:
        """Write what is in buffers."""
        self._writer.close()
