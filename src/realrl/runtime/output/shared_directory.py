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
"""Seconds until a node sees what another one has written: network file systems look again from time to time."""


def check_shared(run_dir: Path, process: Process, cluster: Cluster) -> None:
    """Check, on all ranks together, that every node sees what the first rank writes into `run_dir`.

    Ranks of several nodes write models there, and a run that resumes reads them. UserError, on all ranks, that
    names the nodes that have directories of their own.
    """
    if cluster.nodes == 1:
        return
    # The directory need not be there yet.
    nearest = next(folder for folder in (run_dir, *run_dir.absolute().parents) if folder.is_dir())
    probe, refusal = partial_path(nearest / f"shared-{secrets.token_hex(8)}"), ""
    if process.rank == WRITER:
        try:
            probe.touch()
        except OSError as error:
            refusal = reason_of(error)
    # Not to be looked for before it is there: that it is missing would be remembered for a while.
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
            f" {'does' if len(blind) == 1 else 'do'} not see what the first rank has written; choose one on a file"
            " system that they share"
        )


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
