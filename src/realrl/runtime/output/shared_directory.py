"""Check that the nodes of a run share its directory."""

import os
import secrets
import socket
import time
from contextlib import suppress
from pathlib import Path

from realrl.config.errors import UserError, join
from realrl.config.files import partial_path, reason_of
from realrl.plan.cluster import Cluster
from realrl.program.lower import WRITER
from realrl.runtime.processes.process import Process

PATIENCE = 15.0
"""Maximum seconds until a node sees a new file of another node. Network file systems poll for changes."""


def check_shared(run_dir: Path, process: Process, cluster: Cluster) -> None:
    """Check that every node sees the first rank's files in `run_dir`. All ranks call this together.

    Ranks on several nodes write models there, and a resumed run reads these models. Raises UserError on all ranks,
    with the names of the nodes that see another directory.
    """
    if cluster.nodes == 1:
        return
    # The directory may not exist yet.
    nearest = next(folder for folder in (run_dir, *run_dir.absolute().parents) if folder.is_dir())
    probe, refusal = partial_path(nearest / f"shared-{secrets.token_hex(8)}"), ""
    if process.rank == WRITER:
        try:
            probe.touch()
        except OSError as error:
            refusal = reason_of(error)
    # Look for the file only after it exists, because a file system may remember that it was missing.
    place, refusal = process.gather((str(probe), refusal))[WRITER]
    if refusal:
        raise UserError(f"run_dir={run_dir} cannot be written: {refusal}")
    try:
        node = f"node {cluster.node(process.rank)} ({socket.gethostname()})"
        everyone: list[tuple[bool, str]] = process.gather((_appears(Path(place)), node))
    finally:
        if process.rank == WRITER:
            probe.unlink(missing_ok=True)
    blind = list(dict.fromkeys(node for seen, node in everyone if not seen))
    if blind:
        raise UserError(
            f"run_dir={run_dir} is not the same directory on all nodes: {join(blind)}"
            f" {'does' if len(blind) == 1 else 'do'} not see the first rank's file; choose a directory on a file"
            " system that they share"
        )


def _appears(file: Path) -> bool:
    deadline = time.monotonic() + PATIENCE
    while not file.exists():
        if time.monotonic() > deadline:
            return False
        # This makes a network file system read the directory again.
        with suppress(OSError):
            os.listdir(file.parent)
        time.sleep(0.2)
    return True
