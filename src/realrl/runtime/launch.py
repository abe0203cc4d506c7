"""The local launcher: several processes on this machine, as torchrun would start them."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from realrl.config.errors import UserError
from realrl.plan.cluster import Cluster
from realrl.runtime.environment import ERRORS_VARIABLE, STORE_VARIABLE


def launch(cluster: Cluster, arguments: Sequence[str]) -> int:
    """Run `realrl ARGUMENTS` in one local process per device of `cluster`; the exit status of the run.

    When one process fails, the others are ended. Raises UserError with the sentence of the first process that
    left one.
    """
    if cluster.nodes > 1:
        raise UserError(
            f"cluster={cluster} has {cluster.nodes} nodes; start it on each of them with"
            f" torchrun --nnodes {cluster.nodes} --nproc-per-node {cluster.devices_per_node} -m realrl ..."
        )
    with tempfile.TemporaryDirectory(prefix="realrl-") as scratch:
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "realrl", *arguments],
                env=_environment(rank, cluster.size, scratch),
                stdin=subprocess.DEVNULL,
            )
            for rank in range(cluster.size)
        ]
        status = _wait(processes)
        sentences = sorted(Path(scratch).glob("error-*"))
        if sentences:
            raise UserError(sentences[0].read_text())
        return status


def report_user_error(error: UserError) -> None:
    """Leave a UserError for the local launcher if there is one, else print it."""
    directory = os.environ.get(ERRORS_VARIABLE)
    if directory is None:
        print(f"realrl: {error}", file=sys.stderr)
    else:
        (Path(directory) / f"error-{int(os.environ['RANK']):06}").write_text(str(error))


def _environment(rank: int, world: int, scratch: str) -> dict[str, str]:
    threads = max(1, len(os.sched_getaffinity(0)) // world)
    return {
        "OMP_NUM_THREADS": str(threads),
        "GLOO_SOCKET_IFNAME": "lo",
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        STORE_VARIABLE: str(Path(scratch) / "store"),
        ERRORS_VARIABLE: scratch,
    }


def _wait(processes: Sequence["subprocess.Popen[bytes]"]) -> int:
    """Wait for all; once one fails, end the rest. The status of the first that failed, or 0."""
    failed = 0
    try:
        while any(process.poll() is None for process in processes):
            bad = [p.returncode for p in processes if p.returncode not in (None, 0)]
            if bad and not failed:
                failed = bad[0]
                # Those that failed for the same reason get a moment to say so themselves.
                _end(processes, patience=2.0)
            time.sleep(0.05)
    except KeyboardInterrupt:
        _end(processes, patience=5.0)
        return 128 + signal.SIGINT
    statuses = [p.returncode for p in processes if p.returncode]
    return failed or (statuses[0] if statuses else 0)


def _end(processes: Sequence["subprocess.Popen[bytes]"], patience: float) -> None:
    """Wait `patience` seconds, ask the rest to end, and kill what has not after five more seconds."""
    for action, seconds in ((None, patience), (signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
        for process in processes:
            if action is not None and process.poll() is None:
                process.send_signal(action)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and any(process.poll() is None for process in processes):
            time.sleep(0.05)
