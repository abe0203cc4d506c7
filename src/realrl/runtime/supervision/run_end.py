"""Write how a run ended, and its notes, to files of the run directory. Does not import torch."""

import json
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from realrl.config.files import write_whole
from realrl.config.json_file import parse_rows, read_tail

ENDED = "ended.json"
"""Name of the file that records how the last start of the run ended. A killed command does not write it."""
RESTARTING = -1
"""Status of a run that has failed and is being restarted."""
NOTES = "notes.jsonl"
"""Name of the file with one JSON line for each note, which contains its text and time."""
KEPT_NOTES = 1000
"""Maximum number of notes that a process writes."""
_TAIL = 1 << 20
"""Maximum bytes that are read from the end of the notes."""


@dataclass(frozen=True)
class RunEnd:
    """How a run ended."""

    status: int
    """Exit status of the command, or `RESTARTING`."""
    message: str
    """Error message; empty if there is none."""
    time: float
    """When the run ended, in seconds since 1970."""

    @classmethod
    def load(cls, run_dir: Path) -> Self | None:
        """Read the end of a run from its directory; None if the file is missing or damaged."""
        try:
            found = json.loads((run_dir / ENDED).read_bytes())
            return cls(int(found["status"]), str(found["message"]), float(found["time"]))
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None


def write_end(run_dir: Path, status: int, message: str = "") -> None:
    """Write how a run ended. If that is impossible, as on a full disk, nothing happens."""
    with suppress(OSError):
        write_whole(run_dir / ENDED, json.dumps(asdict(RunEnd(status, message, time.time()))) + "\n")


class NoteFile:
    """Writes the notes of a run. If a note cannot be written, it is lost, and the run continues."""

    def __init__(self, run_dir: Path) -> None:
        self._file = run_dir / NOTES
        self._left = KEPT_NOTES

    def add(self, text: str) -> None:
        """Append a note."""
        if self._left > 0:
            self._left -= 1
            line = json.dumps({"time": round(time.time(), 3), "text": text}, ensure_ascii=False)
            # Odd file names contain half surrogate pairs, which JSON can escape but UTF-8 cannot encode.
            with suppress(OSError), self._file.open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(line + "\n")


def read_notes(run_dir: Path) -> list[str]:
    """Read the texts of the last notes of a run, in order. Damaged lines are skipped."""
    rows = parse_rows(read_tail(run_dir / NOTES, _TAIL))
    return [row["text"] for row in rows if isinstance(row.get("text"), str)][-KEPT_NOTES:]
