"""Protocol of trackers, and what they are told of a run."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from realrl.config.files import write_whole

IDS = "trackers"
"""Directory of what trackers call a run."""


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """A run as trackers see it, without secrets."""

    directory: Path
    settings: Mapping[str, Any]
    """Nested settings of the recipe."""
    done: int = 0
    """Training steps that were done before; above 0 where a run is resumed."""
    notes: Sequence[str] = ()
    """Notes of earlier starts of the run."""

    @property
    def name(self) -> str:
        """Name of the run where the recipe gives none."""
        return self.directory.resolve().name

    def load_id(self, tracker: str) -> str | None:
        """Find what a tracker calls this run, if it has seen it before."""
        try:
            found = json.loads(self._file(tracker).read_text(encoding="utf-8"))["id"]
        except (OSError, ValueError, LookupError, TypeError):
            return None
        return found if isinstance(found, str) else None

    def save_id(self, tracker: str, name: str) -> None:
        """Keep what a tracker calls this run, so that it goes on there when it is resumed. OSError."""
        write_whole(self._file(tracker), json.dumps({"id": name}) + "\n")

    def _file(self, tracker: str) -> Path:
        return self.directory / IDS / f"{tracker}.json"


class Tracker(Protocol):
    """A place for metrics. All methods are called in one thread of its own, and may raise anything or hang."""

    def open(self, run: TrackedRun) -> None:
        """Begin, or go on with, a run. Called again after it has failed."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take metrics, by names such as `train/actor.train/loss`, after so many steps.

        Steps after a resumed checkpoint come again.
        """

    def note(self, text: str) -> None:
        """Take a message for the user."""

    def close(self, *, done: bool) -> None:
        """End the run, well or not."""
