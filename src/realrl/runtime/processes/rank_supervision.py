"""Supervise this rank: publish its heartbeats and its status file, and watch other ranks and its launcher."""

import faulthandler
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from realrl.config.errors import RunError, UserCodeError, UserError
from realrl.recipe.run_settings import LaunchConfig
from realrl.runtime.processes.environment import LAUNCHER_VARIABLE, restart_count
from realrl.runtime.processes.host_memory import read_memory
from realrl.runtime.processes.signals import deferred_termination
from realrl.runtime.supervision.board import FileBoard, StoreBoard
from realrl.runtime.supervision.failures import (
    CONSEQUENCE,
    PLACE,
    RUN_STATUS,
    describe_failure,
    log_error,
    report_end,
)
from realrl.runtime.supervision.heartbeat import INTERVAL, RANKS, Activity, write_status
from realrl.runtime.supervision.orphans import SCRATCH_VARIABLE, end_with_launcher
from realrl.runtime.supervision.watchdog import PeerWatch

STATUS_EVERY = 2.0
"""Seconds between writes of the status file."""
PATIENCE = 3.0
"""Seconds that a rank waits after it has lost a peer, so that other ranks can report the cause."""


class Supervision:
    """Threads that supervise one rank while it computes or waits."""

    def __init__(self, rank: int, device: torch.device) -> None:
        """If realrl's launcher has started this process, begin to send heartbeats to the launcher.

        This process then also ends when the launcher ends.
        """
        self.activity = Activity(rank, restart_count())
        self._device = device
        self._board: FileBoard | StoreBoard | None = None
        self._peers: PeerWatch | None = None
        self._run_dir: Path | None = None
        self._closed = threading.Event()
        self._heartbeats: threading.Thread | None = None
        scratch = os.environ.get(SCRATCH_VARIABLE)
        if scratch is not None:
            self._board = board = FileBoard(scratch, rank)
            self.activity.on_change = lambda: board.publish(self.activity.describe())
            # Never stop these heartbeats, because a process that is exiting is not frozen.
            self._begin_heartbeats(board, threading.Event())
            end_with_launcher(int(os.environ[LAUNCHER_VARIABLE]))

    def join_peers(self, world: int, token: str, limits: LaunchConfig) -> None:
        """Publish heartbeats in torchrun's store, unless realrl's launcher reads them.

        `token`: text that is equal on all ranks, and different at each start.
        """
        if self._board is None:
            self._board = board = StoreBoard(self.activity.rank, world, token, limits.freeze_seconds)
            self._peers = PeerWatch(board, limits, self.activity.rank, _end)
            # A script may go on after the run. A thread that still uses the store would abort it at its end.
            self._heartbeats = self._begin_heartbeats(board, self._closed)

    def watch_peers(self) -> None:
        """Start watching other ranks. All ranks must have joined."""
        if self._peers is not None:
            self._peers.start()

    def publish(self, run_dir: Path) -> None:
        """Keep the status file in the run directory up to date from now on."""
        self._run_dir = run_dir
        with suppress(OSError):
            (run_dir / RANKS).mkdir(parents=True, exist_ok=True)
        self._write_status()
        # Use a separate thread, so that a rank does not look frozen if the file system hangs.
        _repeat("status", STATUS_EVERY, self._write_status, self._closed)

    def leave(self, error: object) -> None:
        """Begin to exit, and report a failure that other ranks may not know."""
        if not isinstance(error, BaseException):
            self.activity.enter("end")
            return
        shared = isinstance(error, UserError | RunError)
        if isinstance(error, Exception) and not shared:
            setattr(error, PLACE, self.activity.place)
        if isinstance(error, UserCodeError) and error.alone:
            shared = False
        if shared or not isinstance(error, Exception) or not isinstance(self._board, StoreBoard):
            return
        # Log the error first: if another rank is the cause, this process ends before it can report its own failure.
        log_error(error)
        failure = describe_failure(error)
        if failure.distance == CONSEQUENCE:
            # When a rank has died, torchrun ends all ranks by SIGTERM. This signal must not be reported as the
            # cause.
            with deferred_termination(PATIENCE):
                time.sleep(PATIENCE)
        self._board.report(failure)

    def close(self) -> None:
        """Stop watching, and stop being watched. realrl's launcher gets heartbeats until the process has exited."""
        if self._peers is not None:
            self._peers.stop()
        self.activity.ended = True
        if self._board is not None:
            self._board.publish(self.activity.beat())
        self._closed.set()
        if self._heartbeats is not None:
            self._heartbeats.join(INTERVAL)
        self._write_status()

    def _begin_heartbeats(self, board: FileBoard | StoreBoard, stop: threading.Event) -> threading.Thread:
        if hasattr(signal, "SIGUSR1"):
            # This handler is written in C, so it works even while Python waits for native code.
            faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
        board.publish(self.activity.beat())
        return _repeat("heartbeats", INTERVAL, lambda: board.publish(self.activity.beat()), stop)

    def _write_status(self) -> None:
        if self._run_dir is not None:
            heartbeat, memory = self.activity.describe(), read_memory()
            heartbeat.resident_bytes, heartbeat.peak_resident_bytes = memory.resident, memory.peak
            heartbeat.device_bytes = memory.resident
            if self._device.type == "cuda":
                heartbeat.device_bytes = torch.cuda.memory_reserved(self._device)
                properties = torch.cuda.get_device_properties(self._device)
                heartbeat.device_limit_bytes = properties.total_memory
            write_status(self._run_dir, heartbeat)


def _repeat(name: str, seconds: float, action: Callable[[], None], stop: threading.Event) -> threading.Thread:
    """Call a function again and again in a thread, which is returned."""

    def work() -> None:
        while not stop.wait(seconds):
            action()

    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    return thread


def _end(message: str, mine: bool) -> None:
    """End this process at once because the run has failed.

    The rank that has found the failure prints the message.
    """
    with suppress(OSError):
        report_end(message, prints=mine)
    os._exit(RUN_STATUS)
