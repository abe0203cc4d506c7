"""Notes of a run in its directory."""

import json
import time
from contextlib import suppress
from pathlib import Path

NOTES = "notes.jsonl"
"""File of a run directory: a line for each note, with the time of the day at which it was made."""
KEPT_NOTES = 1000
"""Maximum notes that a process writes."""


class NoteFile:
    """Writer of the notes of a run. What cannot be written never ends a run."""

    def __init__(self, run_dir: Path) -> None:
        self._file = run_dir / NOTES
        self._left = KEPT_NOTES

    def add(self, text: str) -> None:
        """Append a note."""
        if self._left > 0:
            self._left -= 1
            line = json.dumps({"time": round(time.time(), 3), "text": text}, ensure_ascii=False)
            with suppress(OSError), self._file.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
