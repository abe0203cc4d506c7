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
from realrl.plan.plan import Plan
from realrl.runtime.environment import (
    ERRORS_VARIABLE,
    LAUNCHER_VARIABLE,
    PLAN_VARIABLE,
    STORE_VARIABLE,
    is_writer,
)


def check_local(cluster: Cluster) -> None:
    """UserError if processes of this machine alone cannot be the cluster's devices."""
    if cluster.nodes > 1:
        raise UserError(
            f"cluster={cluster} has {cluster.nodes} nodes; start it on each of them with"
            f" torchrun --nnodes {cluster.nodes} --nproc-per-node {cluster.devices_per_node} -m realrl ..."
        )


def launch(cluster: Cluster, arguments: Sequence[str], plan: Plan | None = None) -> int:
    """Run `realrl ARGUMENTS` in one local process per device of `cluster`; the exit status of the run.

    `plan` is what has been found for a recipe that says `plan: search`. When one process fails, the others are
    ended. Raises UserError with the sentence of the first process that left one. As in a shell, the status is
    128 + N where signal N ended the run.
    """
    with tempfile.TemporaryDirectory(prefix="realrl-") as scratch:
        processes: list[subprocess.Popen[bytes]] = []
        variables = {}
        if plan is not None:
            variables[PLAN_VARIABLE] = str(Path(scratch) / "plan.yaml")
            plan.save(variables[PLAN_VARIABLE])
        try:
            for rank in range(cluster.size):
                command = [sys.executable, "-m", "realrl", *arguments]
                environment = _environment(rank, cluster.size, scratch) | variables
                processes.append(subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL))
            failed = _wait(processes)
        except KeyboardInterrupt:
            _end(processes, patience=5.0)
            return 128 + signal.SIGINT
        sentences = sorted(Path(scratch).glob("error-*"))
        if sentences:
            raise UserError(sentences[0].read_text())
        return 0 if failed is None else _status(failed, processes[failed].returncode)


def report_user_error(error: UserError) -> None:
    """Leave a UserError for the local launcher if there is one, else print it, once per node."""
    sentence = " ".join(str(error).splitlines())
    directory = os.environ.get(ERRORS_VARIABLE)
    if directory is not None:
        (Path(directory) / f"error-{int(os.environ['RANK']):06}").write_text(sentence)
    elif is_writer():
        print(f"realrl: {sentence}", file=sys.stderr)
    elif int(os.environ.get("LOCAL_RANK", 0)) == 0:
        # The first rank of another node, whose files may differ from the first node's.
        print(f"realrl: rank {os.environ['RANK']}: {sentence}", file=sys.stderr)


def _environment(rank: int, world: int, scratch: str) -> dict[str, str]:
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return {
        "OMP_NUM_THREADS": str(max(1, cores // world)),
        # glibc gives large blocks back to the system at once, and a training step asks for them all again,
        # thousands of page faults each time.
        "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),
        "MALLOC_TRIM_THRESHOLD_": str(8 * 10**9),
        "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        STORE_VARIABLE: str(Path(scratch) / "store"),
        ERRORS_VARIABLE: scratch,
        LAUNCHER_VARIABLE: str(os.getpid()),
    }


def _wait(processes: Sequence["subprocess.Popen[bytes]"]) -> int | None:
    """Wait for all; once one fails, end the rest. The rank of the first that failed, or None."""
    while True:
        codes = [process.poll() for process in processes]
        failed = next((rank for rank, code in enumerate(codes) if code), None)
        if failed is not None:
            # Those that failed for the same reason get a moment to say so themselves.
            _end(processes, patience=2.0)
            return failed
        if None not in codes:
            return None
        time.sleep(0.05)


def _status(rank: int, code: int) -> int:
    """The exit status that the end of a rank means; a signal is named, since its process could not."""
    if code > 0:
        return code
    reason = signal.strsignal(-code) or "unknown"
    print(f"realrl: signal {-code} ({reason}) ended the process of rank {rank}", file=sys.stderr)
    return 128 - code


def _end(processes: Sequence["subprocess.Popen[bytes]"], patience: float) -> None:
    """Wait `patience` seconds, ask the rest to end, and kill what has not after five more seconds."""
    for action, seconds in ((None, patience), (signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
        for process in processes:
            if action is not None and process.poll() is None:
                process.send_signal(action)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and any(process.poll() is None for process in processes):
            time.sleep(0.05)
