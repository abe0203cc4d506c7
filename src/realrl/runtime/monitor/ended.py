"""End of a run, as a file of its directory. No torch."""

import json
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from realrl.config.files import write_whole

ENDED = "ended.json"
"""File of a run directory. A process that is killed leaves none, or that of an earlier start."""


STARTS_AGAIN = -1
"""Status of a run whose processes have failed and are being started again."""


@dataclass(frozen=True)
class Ended:
    """End of a run."""

    status: int
    """Exit status of the command, or `STARTS_AGAIN`."""
    message: str
    """Error message; empty where there is none."""
    time: float
    """When it ended, in seconds since 1970."""

    @classmethod
    def load(cls, run_dir: Path) -> Self | None:
        """Read the file of a run directory; None where there is none, or something else."""
        try:
            found = json.loads((run_dir / ENDED).read_bytes())
            return cls(int(found["status"]), str(found["message"]), float(found["time"]))
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None


def write_end(run_dir: Path, status: int, message: str = "") -> None:
    """Write how a run ended; where that cannot be written, nothing."""
    with suppress(OSError):
        write_whole(run_dir / ENDED, json.dumps(asdict(Ended(status, message, time.time()))) + "\n")
