"""Probe of processes of this machine, by what the system knows of them. No torch."""

import os
import sys
from contextlib import suppress
from pathlib import Path

from realrl.runtime.monitor.sign import Sign


class WorkProbe:
    """Probe of processes that give no sign of life: whether they work."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, int]] = {}
        """Latest sign of each process and its CPU time, in ticks, when it was asked for last."""

    def works(self, sign: Sign) -> bool:
        """Check whether the process that gave a sign has used a core since, or waits for one.

        False where the system does not tell, as on macOS.
        """
        used, runnable = 0, False
        with suppress(OSError, ValueError, IndexError):
            process = Path(f"/proc/{sign.pid}")
            used = sum(map(int, _read_state(process)[11:13]))
            runnable = any(_read_state(thread)[0] == "R" for thread in (process / "task").iterdir())
        # What it has used between its last sign and the first question, it may have used before it was stopped.
        beats, before = self._seen.get(sign.pid, (sign.beats, used))
        self._seen[sign.pid] = sign.beats, used
        return runnable or (beats == sign.beats and used > before)


def is_alive(pid: int) -> bool:
    """Check whether a process runs; one that waits to be collected does not."""
    if sys.platform != "linux":
        try:
            os.kill(pid, 0)
        except OSError:
            return False
        return True
    try:
        return _read_state(Path(f"/proc/{pid}"))[0] not in "ZX"
    except OSError:
        return False


def _read_state(process: Path) -> list[str]:
    """Read the fields of a process or thread from its state on."""
    return (process / "stat").read_text().rpartition(")")[2].split()
