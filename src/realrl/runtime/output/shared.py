"""Check that the nodes of a run share its directory."""

import os
import secrets
import socket
import time
from contextlib import suppress
from pathlib import Path

from realrl.config.errors import UserError
from realrl.config.files import partial_path
from realrl.program.lower import WRITER
from realrl.runtime.processes.process import Process

PATIENCE = 15.0
"""Seconds until a node sees what another one has written: network file systems look again from time to time."""


def check_shared(run_dir: Path, process: Process, nodes: int) -> None:
    """Check, on all ranks together, that every node sees what the first rank writes into `run_dir`.

    Ranks of several nodes write models there, and a run that resumes reads them. UserError, on all ranks, that
    names the node that has a directory of its own.
    """
    if nodes == 1:
        return
    # The directory need not be there yet.
    nearest = next(folder for folder in (run_dir, *run_dir.absolute().parents) if folder.is_dir())
    probe = Path(process.gather(str(partial_path(nearest / f"shared-{secrets.token_hex(8)}")))[WRITER])
    try:
        if process.rank == WRITER:
            probe.touch()
        # Not to be looked for before it is there: that it is missing would be remembered for a while.
        process.gather(None)
        with process.together():
            if not _appears(probe):
                node = process.rank * nodes // process.world
                raise UserError(
                    f"run_dir={run_dir} is not the same directory on all nodes: node {node}"
                    f" ({socket.gethostname()}) does not see what the first rank has written; choose one on a file"
                    " system that they share"
                )
    finally:
        if process.rank == WRITER:
            probe.unlink(missing_ok=True)


def _appears(file: Path) -> bool:
    deadline = time.monotonic() + PATIENCE
    while not file.exists():
        if time.monotonic() > deadline:
            return False
        # Has a network file system look at the directory again.
        with suppress(OSError):
            os.listdir(file.parent)
        time.sleep(0.2)
    return True
