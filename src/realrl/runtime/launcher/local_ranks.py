"""Processes of one start of a run on this machine: one per rank, watched until they end."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path

from realrl.config.files import write_whole
from realrl.plan.cluster import Cluster
from realrl.recipe.run_settings import LaunchConfig
from realrl.runtime.launcher.termination import Termination
from realrl.runtime.monitor.sign import FileBoard, Sign
from realrl.runtime.monitor.watch import SignWatch, Verdict, WatchLimits
from realrl.runtime.monitor.work_probe import WorkProbe
from realrl.runtime.prepare.host import count_threads
from realrl.runtime.processes.environment import (
    LAUNCHER_VARIABLE,
    PLAN_VARIABLE,
    RESTART_VARIABLE,
    SCRATCH_VARIABLE,
    SLOT_VARIABLE,
    STORE_VARIABLE,
)
from realrl.runtime.processes.error_reports import (
    CAUSE,
    DEATH,
    RUN_STATUS,
    Failure,
    find_first_cause,
    read_failures,
)
from realrl.runtime.processes.logs import name_log_file
from realrl.runtime.processes.network import INTERFACE_VARIABLES, find_loopback
from realrl.runtime.processes.orphans import find_ranks
from realrl.runtime.processes.signals import show_cursor

POLL = 0.05
"""Seconds between checks of the processes."""
LOOK = 0.5
"""Seconds between looks at their signs of life."""
MOMENT = 2.0
"""Seconds that ranks get, after one has failed, to notice and report it themselves."""
DUMP = 0.3
"""Seconds that ranks get to write their stacks into their logs."""
LAST = 30.0
"""Seconds after SIGKILL in which the system ends a process, unless a driver or file system keeps it for ever."""
TEMPORARY = "tmp"
"""Directory in the scratch directory for temporary files of ranks."""
_ASKED = (-signal.SIGTERM, 128 + signal.SIGTERM)
"""Exit statuses of ranks that were told to end."""


@dataclass(frozen=True)
class Start:
    """Command to start, `realrl ARGUMENTS`, in a process for each device of the cluster."""

    cluster: Cluster
    arguments: Sequence[str]
    plan: str | None = None
    """Text of the plan file found for a recipe that says `plan: search`."""


@dataclass
class RanksEnd:
    """End of all processes."""

    cause: Failure | None = None
    """First cause of a failure; None where all have ended well."""
    signs: Mapping[int, Sign] = field(default_factory=dict)
    """What ranks were at when the first failure was noticed."""

    @property
    def step(self) -> int:
        """Number of training steps that the run had done."""
        return max((sign.step for sign in self.signs.values()), default=0)

    @property
    def progressed(self) -> bool:
        """True if any process of this start has finished a training step."""
        return any(sign.finished for sign in self.signs.values())


class LocalRanks:
    """Processes of one start, in a scratch directory."""

    def __init__(self, scratch: Path, settings: LaunchConfig) -> None:
        self._scratch, self._settings = scratch, settings
        self._processes: list[subprocess.Popen[bytes]] = []
        self._board = FileBoard(scratch)
        self._watch = SignWatch(WatchLimits.of(settings), works=WorkProbe().works)
        self._termination = Termination(settings.grace_seconds, self._signal)

    def run(self, start: Start, slots: Sequence[int], restart: int) -> RanksEnd:
        """Start the processes on the devices of these numbers, and wait for their end, which is that of all."""
        variables = {RESTART_VARIABLE: str(restart), **_visible(slots)}
        if start.plan is not None:
            variables[PLAN_VARIABLE] = str(self._scratch / "plan.yaml")
            write_whole(Path(variables[PLAN_VARIABLE]), start.plan)
        (self._scratch / TEMPORARY).mkdir()
        try:
            for rank in range(start.cluster.size):
                environment = _environment(rank, start.cluster.size, self._scratch)
                environment |= {**variables, SLOT_VARIABLE: str(slots[rank])}
                self._processes.append(_start(start.arguments, environment, rank, self._scratch))
            return self._wait()
        finally:
            self._end()

    def _wait(self) -> RanksEnd:
        """Wait for all processes. Once one fails, the others get a moment to report why."""
        failed: dict[int, float] = {}
        outcome = RanksEnd()
        first = looked = time.monotonic()
        while True:
            codes = [process.poll() for process in self._processes]
            now = time.monotonic()
            if any(codes) and not failed:
                outcome.signs, first = self._board.read(), now
            for rank, code in enumerate(codes):
                if code:
                    failed.setdefault(rank, time.time())
            # Ranks that end because they were told to may take their time.
            unasked = (
                failed
                if not self._termination.asked
                else [code for code in codes if code and code not in _ASKED]
            )
            if None not in codes or (unasked and now - first > MOMENT):
                break
            self._termination.forward(now)
            if not failed and now - looked > LOOK:
                looked, signs = now, self._board.read()
                verdict = self._watch.look({r: s for r, s in signs.items() if codes[r] is None})
                if verdict is not None:
                    self._dump_stacks(signs)
                    return RanksEnd(_judge(verdict), signs)
            time.sleep(POLL)
        if failed:
            self._dump_stacks(outcome.signs)
            outcome.cause = self._find_cause(failed, outcome.signs)
        return outcome

    def _find_cause(self, failed: Mapping[int, float], signs: Mapping[int, Sign]) -> Failure:
        failures = {failure.rank: failure for failure in read_failures(self._scratch)}
        for rank, noticed in failed.items():
            code = self._processes[rank].returncode
            failures.setdefault(rank, describe_death(rank, code, noticed, signs.get(rank)))
        return find_first_cause(failures.values())

    def _dump_stacks(self, signs: Mapping[int, Sign]) -> None:
        """Have ranks that still run write their stacks into their logs."""
        running = [rank for rank in signs if self._processes[rank].poll() is None]
        for rank in running:
            self._processes[rank].send_signal(signal.SIGUSR1)
        if running:
            time.sleep(DUMP)

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(number)

    def _end(self) -> None:
        """Kill what still runs: processes, and what those that were killed have started."""
        killed = any(process.poll() is None or process.returncode < 0 for process in self._processes)
        self._signal(signal.SIGKILL)
        deadline = time.monotonic() + LAST
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
            for pid in find_ranks(str(self._scratch)):
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
        if self._processes and (self._processes[0].returncode or 0) < 0:
            show_cursor()


def _start(
    arguments: Sequence[str], environment: Mapping[str, str], rank: int, scratch: Path
) -> "subprocess.Popen[bytes]":
    """Start a rank.

    Only the first one has the screen, and none gets Ctrl-C or SIGHUP, which a terminal sends to all: the launcher
    ends them.
    """
    command = [sys.executable, "-m", "realrl", *arguments]
    # Signals that are blocked here are blocked in what is started. One that comes meanwhile is not lost.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
    try:
        with nullcontext() if rank == 0 else name_log_file(scratch, rank).open("ab") as log:
            return subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _environment(rank: int, world: int, scratch: Path) -> dict[str, str]:
    return {
        "OMP_NUM_THREADS": str(count_threads(world)),
        **dict.fromkeys(INTERFACE_VARIABLES, find_loopback()),
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        STORE_VARIABLE: str(scratch / "store"),
        SCRATCH_VARIABLE: str(scratch),
        LAUNCHER_VARIABLE: str(os.getpid()),
        # What a rank that is killed leaves there goes with the scratch directory.
        "TMPDIR": str(scratch / TEMPORARY),
    }


def _visible(slots: Sequence[int]) -> dict[str, str]:
    """Hide the GPUs that the run has given up."""
    if list(slots) == list(range(len(slots))):
        return {}
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(slot) for slot in range(max(slots) + 1)] if given is None else given.split(",")
    return {"CUDA_VISIBLE_DEVICES": ",".join(names[slot] for slot in slots if slot < len(names))}


def describe_death(rank: int, code: int, noticed: float, sign: Sign | None) -> Failure:
    """Describe the failure of a rank that could not report it."""
    place = "" if sign is None else f" {sign.place}"
    if code > 0:
        message = f"the process of rank {rank} ended with status {code}{place} and left no message"
        return Failure(message=message, status=code, rank=rank, time=noticed, distance=DEATH, device=True)
    reason = signal.strsignal(-code) or "unknown"
    message = f"signal {-code} ({reason}) ended the process of rank {rank}{place}"
    # Libraries abort a process whose peers have gone. It happened at some time since the look before.
    distance = DEATH if -code == signal.SIGABRT else CAUSE
    return Failure(
        message=message, status=128 - code, rank=rank, time=noticed - 2 * POLL, distance=distance, device=True
    )


def _judge(verdict: Verdict) -> Failure:
    """Describe the failure of a rank that was found frozen or stuck."""
    return Failure(
        message=verdict.message,
        status=RUN_STATUS,
        rank=verdict.rank,
        time=time.time(),
        device=verdict.frozen,
    )
