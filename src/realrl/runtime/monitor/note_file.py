"""Notes of a run in its directory."""

import json
import time
from contextlib import suppress
from pathlib import Path

from realrl.config.json_file import parse_rows, read_tail

NOTES = "notes.jsonl"
"""File of a run directory: a line for each note, with the time of the day at which it was made."""
KEPT_NOTES = 1000
"""Maximum notes that a process writes."""
_TAIL = 1 << 20
"""Bytes at the end of the file that are read."""


def read_notes(run_dir: Path) -> list[str]:
    """Read the texts of the last notes of a run, in order; what is damaged is left out."""
    rows = parse_rows(read_tail(run_dir / NOTES, _TAIL))
    return [row["text"] for row in rows if isinstance(row.get("text"), str)][-KEPT_NOTES:]


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
            # Half a surrogate pair, as of an odd file name, becomes its escape, which JSON has as well.
            with suppress(OSError), self._file.open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(line + "\n")
