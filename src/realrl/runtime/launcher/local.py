"""Ranks in processes of this machine. Does not import torch."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from realrl.config.files import write_whole
from realrl.config.script_objects import OBJECTS_VARIABLE
from realrl.plan.cluster import Cluster
from realrl.runtime.launcher.launch import Start
from realrl.runtime.prepare.host import count_threads
from realrl.runtime.processes.environment import (
    LAUNCHER_VARIABLE,
    PLAN_VARIABLE,
    RESTART_VARIABLE,
    SLOT_VARIABLE,
    STORE_VARIABLE,
)
from realrl.runtime.processes.logs import keep_logs, name_log_file
from realrl.runtime.processes.network import INTERFACE_VARIABLES, find_loopback
from realrl.runtime.processes.signals import show_cursor
from realrl.runtime.supervision.board import FileBoard
from realrl.runtime.supervision.failures import ERROR_FILE_VARIABLE
from realrl.runtime.supervision.orphans import SCRATCH_VARIABLE, Scratch, kill_ranks

_LAST = 30.0
"""Seconds that the system gets to end a process after SIGKILL. A driver or file system may block this forever."""
SCREEN = "screen"
"""Name of the file in the scratch directory for the first rank's output, on a node of a Ray cluster."""
_TEMPORARY = "tmp"
"""Name of the directory in the scratch directory for temporary files of ranks."""


@dataclass(frozen=True)
class RayNode:
    """Node of a Ray cluster that runs ranks."""

    node: int
    """Number of this node among the nodes of the run."""
    address: str
    """Address of the rendezvous of all ranks of the run."""
    port: int
    job: str
    """Name of the run, which stays the same after restarts."""


class LocalRanks(FileBoard):
    """The ranks of one start, or its ranks on one node. They report to files in their scratch directory."""

    poll_seconds = 0.05

    def __init__(
        self, start: Start, devices: Sequence[int], restart: int, ray: RayNode | None = None
    ) -> None:
        """Start a process for each device. The processes see only the GPUs whose numbers are in `devices`.

        `restart`: number of restarts of the run so far. `ray`: the node of this machine in a Ray cluster.
        """
        self._scratch = Scratch()
        self.path = scratch = self._scratch.path
        super().__init__(scratch)
        self._processes: list[subprocess.Popen[bytes]] = []
        shared = {RESTART_VARIABLE: str(restart), **hide_gpus(devices)}
        ranks = start.cluster.ranks(0 if ray is None else ray.node)
        try:
            arguments = [*start.arguments]
            if start.recipe is not None:
                # The directory is private, so the recipe in it may contain secrets.
                arguments.insert(1, str(scratch / "recipe.yaml"))
                write_whole(scratch / "recipe.yaml", start.recipe)
            if start.plan is not None:
                shared[PLAN_VARIABLE] = str(scratch / "plan.yaml")
                write_whole(scratch / "plan.yaml", start.plan)
            if start.objects is not None:
                shared[OBJECTS_VARIABLE] = str(scratch / "objects")
                (scratch / "objects").write_bytes(start.objects)
            (scratch / _TEMPORARY).mkdir()
            for rank, device in zip(ranks, devices, strict=True):
                variables = _describe_rank(rank, start.cluster, scratch, ray)
                variables |= {**shared, SLOT_VARIABLE: str(device)}
                output = name_log_file(scratch, rank) if rank else None if ray is None else scratch / SCREEN
                self._processes.append(start_process(arguments, variables, output))
        except BaseException:
            self.kill()
            self.close()
            raise

    def poll(self) -> list[int | None]:
        """Return the exit status of each rank."""
        return [process.poll() for process in self._processes]

    def signal(self, number: int, ranks: Sequence[int]) -> None:
        """Send a signal to each of these ranks that still runs."""
        for rank in ranks:
            if self._processes[rank].poll() is None:
                self._processes[rank].send_signal(number)

    def kill(self) -> None:
        """Kill the ranks. If a signal ended one, also kill the processes that ranks have started."""
        killed = any(process.poll() is None or process.returncode < 0 for process in self._processes)
        self.signal(signal.SIGKILL, range(len(self._processes)))
        deadline = time.monotonic() + _LAST
        for rank, process in enumerate(self._processes):
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                print(
                    f"note: the system does not end process {process.pid} of rank {rank}: it waits in the kernel,"
                    " for a device or a file system",
                    file=sys.stderr,
                    flush=True,
                )
        if killed:
            kill_ranks(self.path)
        if self._processes and (self._processes[0].returncode or 0) < 0:
            show_cursor()
        self._processes = []

    def keep_logs(self, directory: Path | None) -> Path | None:
        """Save the logs of ranks that have ended, in `directory` if possible.

        Returns the directory that contains the logs.
        """
        return keep_logs(self.path, directory)

    def close(self) -> None:
        """Remove the scratch directory."""
        self._scratch.close()


def start_process(
    arguments: Sequence[str], environment: Mapping[str, str], output: Path | None
) -> "subprocess.Popen[bytes]":
    """Start a rank, which writes to a file or to the screen. The only rank of a run can also read the keyboard.

    A terminal sends Ctrl-C and SIGHUP to all processes. Ranks block these signals, because only the launcher ends
    ranks.
    """
    command = [sys.executable, "-m", "realrl", *arguments]
    stdin = None if environment["WORLD_SIZE"] == "1" else subprocess.DEVNULL
    # A child inherits the blocked signals. A signal that comes now reaches this process afterwards.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
    try:
        with nullcontext() if output is None else output.open("ab") as log:
            return subprocess.Popen(command, env=environment, stdin=stdin, stdout=log, stderr=log)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _describe_rank(rank: int, cluster: Cluster, scratch: Path, ray: RayNode | None) -> dict[str, str]:
    """Return the environment of a rank, with the variables that torchrun would set."""
    node = cluster.node(rank)
    here = cluster.ranks(node)
    if ray is None:
        # Variables that the user has set take precedence.
        loopback = dict.fromkeys(INTERFACE_VARIABLES, find_loopback())
        environment = {"OMP_NUM_THREADS": str(count_threads(len(here))), **loopback, **os.environ}
        meeting = {STORE_VARIABLE: str(scratch / "store")}
    else:
        # Ray has set a number of threads that is meant for all ranks of the node together.
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        meeting = {"MASTER_ADDR": ray.address, "MASTER_PORT": str(ray.port), "TORCHELASTIC_RUN_ID": ray.job}
    return {
        **environment,
        **meeting,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank - here.start),
        "WORLD_SIZE": str(cluster.size),
        "LOCAL_WORLD_SIZE": str(len(here)),
        "GROUP_RANK": str(node),
        "GROUP_WORLD_SIZE": str(cluster.nodes),
        SCRATCH_VARIABLE: str(scratch),
        ERROR_FILE_VARIABLE: str(scratch / f"failure-{rank}.json"),
        LAUNCHER_VARIABLE: str(os.getpid()),
        # Temporary files of a killed rank are removed together with the scratch directory.
        "TMPDIR": str(scratch / _TEMPORARY),
    }


def hide_gpus(devices: Sequence[int]) -> dict[str, str]:
    """Return the variable that hides all GPUs except these. If these are the first GPUs, no variable is needed."""
    if list(devices) == list(range(len(devices))):
        return {}
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(device) for device in range(max(devices) + 1)] if given is None else given.split(",")
    return {"CUDA_VISIBLE_DEVICES": ",".join(names[device] for device in devices if device < len(names))}
