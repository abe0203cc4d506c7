"""Local launcher: several processes on this machine, as torchrun would start them."""

import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path

from realrl.config.errors import UserError
from realrl.config.files import write_whole
from realrl.plan.cluster import Cluster
from realrl.runtime.output.ended import write_end
from realrl.runtime.processes.environment import (
    LAUNCHER_VARIABLE,
    PLAN_VARIABLE,
    SCRATCH_VARIABLE,
    STORE_VARIABLE,
)
from realrl.runtime.processes.error_reports import (
    CAUSE,
    DEATH,
    USER_STATUS,
    Failure,
    find_first_cause,
    print_failure,
    read_failures,
)
from realrl.runtime.processes.logs import keep_logs, name_log_file
from realrl.runtime.processes.signals import GRACE, show_cursor

POLL = 0.05
"""Seconds between checks of the processes."""
MOMENT = 2.0
"""Seconds that ranks get, after one has failed, to notice and report it themselves."""


def check_local(cluster: Cluster) -> None:
    """Check that processes of this machine alone can be the cluster's devices; else UserError."""
    if cluster.nodes > 1:
        raise UserError(
            f"cluster={cluster} has {cluster.nodes} nodes; start it on each of them with"
            f" torchrun --nnodes {cluster.nodes} --nproc-per-node {cluster.devices_per_node} -m realrl ..."
        )


def launch(
    cluster: Cluster,
    arguments: Sequence[str],
    plan: str | None = None,
    run_dir: Callable[[], Path | None] = lambda: None,
) -> int:
    """Run `realrl ARGUMENTS` in one local process per device of `cluster`; return the exit status of the run.

    `plan` is the text of the plan file found for a recipe that says `plan: search`. When one process fails, the
    others are ended, and the first cause is printed, once. What else they print goes to `logs` in `run_dir()`,
    which may be None if the run has not made one. As in a shell, the status is 128 + N where signal N ended a
    process of the run. Raises Interrupted when this process is to end, after the others have.
    """
    with tempfile.TemporaryDirectory(prefix="realrl-") as scratch:
        processes: list[subprocess.Popen[bytes]] = []
        variables = {}
        if plan is not None:
            variables[PLAN_VARIABLE] = str(Path(scratch) / "plan.yaml")
            write_whole(Path(variables[PLAN_VARIABLE]), plan)
        try:
            for rank in range(cluster.size):
                environment = _environment(rank, cluster.size, scratch) | variables
                processes.append(_start(arguments, environment, rank, scratch))
            failed = _wait(processes)
        finally:
            _end(processes)
            if processes and processes[0].returncode and processes[0].returncode < 0:
                show_cursor()
        directory = run_dir()
        logs = None if directory is None else directory / "logs"
        if not failed:
            if logs is not None:
                keep_logs(Path(scratch), logs)
            return 0
        failures = {failure.rank: failure for failure in read_failures(Path(scratch))}
        for rank, noticed in failed.items():
            failures.setdefault(rank, _death(rank, processes[rank].returncode, noticed))
        cause = find_first_cause(failures.values())
        kept = None
        if cause.status != USER_STATUS or cause.trace:
            kept = keep_logs(Path(scratch), logs)
        if directory is not None:
            write_end(directory, cause.status, cause.message)
        print_failure(cause, logs=kept)
        return cause.status


def _start(
    arguments: Sequence[str], environment: Mapping[str, str], rank: int, scratch: str
) -> "subprocess.Popen[bytes]":
    """Start a rank.

    Only the first one has the screen, and none gets Ctrl-C, which a terminal sends to all: the launcher ends
    them.
    """
    command = [sys.executable, "-m", "realrl", *arguments]
    # Signals that are blocked here are blocked in what is started. One that comes meanwhile is not lost.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        with nullcontext() if rank == 0 else name_log_file(scratch, rank).open("ab") as log:
            return subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


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
        SCRATCH_VARIABLE: scratch,
        LAUNCHER_VARIABLE: str(os.getpid()),
    }


def _wait(processes: Sequence["subprocess.Popen[bytes]"]) -> dict[int, float]:
    """Wait for all processes; return rank -> time of failure, by the clock.

    Once one fails, the others get a moment to fail for the same reason and report it.
    """
    failed: dict[int, float] = {}
    deadline = math.inf
    while time.monotonic() < deadline:
        codes = [process.poll() for process in processes]
        for rank, code in enumerate(codes):
            if code:
                failed.setdefault(rank, time.time())
        if None not in codes:
            break
        if failed and deadline == math.inf:
            deadline = time.monotonic() + MOMENT
        time.sleep(POLL)
    return failed


def _death(rank: int, code: int, noticed: float) -> Failure:
    """Describe the failure of a rank that could not report it."""
    if code > 0:
        message = f"the process of rank {rank} ended with status {code} and left no message"
        return Failure(message=message, status=code, rank=rank, time=noticed, distance=DEATH)
    reason = signal.strsignal(-code) or "unknown"
    message = f"signal {-code} ({reason}) ended the process of rank {rank}"
    # Libraries abort a process whose peers have gone. It happened at some time since the look before.
    distance = DEATH if -code == signal.SIGABRT else CAUSE
    return Failure(message=message, status=128 - code, rank=rank, time=noticed - 2 * POLL, distance=distance)


def _end(processes: Sequence["subprocess.Popen[bytes]"]) -> None:
    """Terminate processes that still run, and kill those that have not ended after GRACE seconds."""
    for action in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            if process.poll() is None:
                process.send_signal(action)
        deadline = time.monotonic() + GRACE
        while time.monotonic() < deadline and any(process.poll() is None for process in processes):
            time.sleep(POLL)
