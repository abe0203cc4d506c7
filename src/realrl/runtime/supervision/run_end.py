"""How a run ended, and its notes, as files of the run directory. Does not import torch."""

import json
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from realrl.config.files import write_whole
from realrl.config.json_file import parse_rows, read_tail

ENDED = "ended.json"
"""How the last start of the run ended. A command that is killed leaves none, or that of an earlier start."""
RESTARTING = -1
"""Status of a run that has failed and is being restarted."""
NOTES = "notes.jsonl"
"""A line for each note, with the time at which it was made."""
KEPT_NOTES = 1000
"""Maximum number of notes that a process writes."""
_TAIL = 1 << 20
"""Bytes at the end of the notes that are read."""


@dataclass(frozen=True)
class RunEnd:
    """End of a run."""

    status: int
    """Exit status of the command, or `RESTARTING`."""
    message: str
    """Error message; empty if there is none."""
    time: float
    """When the run ended, in seconds since 1970."""

    @classmethod
    def load(cls, run_dir: Path) -> Self | None:
        """Read the file of a run directory; None if there is none, or something else."""
        try:
            found = json.loads((run_dir / ENDED).read_bytes())
            return cls(int(found["status"]), str(found["message"]), float(found["time"]))
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None


def write_end(run_dir: Path, status: int, message: str = "") -> None:
    """Write how a run ended; nothing if that is impossible, as on a full disk."""
    with suppress(OSError):
        write_whole(run_dir / ENDED, json.dumps(asdict(RunEnd(status, message, time.time()))) + "\n")


class NoteFile:
    """Writer of the notes of a run. A note that cannot be written is lost, and the run continues."""

    def __init__(self, run_dir: Path) -> None:
        self._file = run_dir / NOTES
        self._left = KEPT_NOTES

    def add(self, text: str) -> None:
        """Append a note."""
        if self._left > 0:
            self._left -= 1
            line = json.dumps({"time": round(time.time(), 3), "text": text}, ensure_ascii=False)
            # Odd file names have half surrogate pairs. JSON has escapes for them; UTF-8 does not.
            with suppress(OSError), self._file.open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(line + "\n")


def read_notes(run_dir: Path) -> list[str]:
    """Read the texts of the last notes of a run, in order. Damaged lines are left out."""
    rows = parse_rows(read_tail(run_dir / NOTES, _TAIL))
    return [row["text"] for row in rows if isinstance(row.get("text"), str)][-KEPT_NOTES:]
