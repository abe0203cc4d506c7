"""Supervision of one rank: its signs of life, whom it watches, and its end when the launcher has gone."""

import os
import time
from contextlib import suppress
from pathlib import Path

import torch

from realrl.config.errors import RunError, UserCodeError, UserError
from realrl.recipe.run_settings import LaunchConfig
from realrl.runtime.monitor.activity import Activity
from realrl.runtime.monitor.monitor import Monitor
from realrl.runtime.monitor.sign import FileBoard
from realrl.runtime.monitor.store_board import PATIENCE, RankWatch, StoreBoard
from realrl.runtime.monitor.watch import Verdict, WatchLimits
from realrl.runtime.processes.environment import LAUNCHER_VARIABLE, SCRATCH_VARIABLE, restart_count
from realrl.runtime.processes.error_reports import (
    CONSEQUENCE,
    PLACE,
    RUN_STATUS,
    describe_failure,
    log_error,
    report_end,
)
from realrl.runtime.processes.orphans import end_with_launcher
from realrl.runtime.processes.signals import deferred_termination


class Supervision:
    """Threads that show a rank to those that watch it, and end it with them."""

    def __init__(self, rank: int, device: torch.device) -> None:
        """Give signs of life to the local launcher from now on, if one has started this process."""
        scratch = os.environ.get(SCRATCH_VARIABLE)
        board = None if scratch is None else FileBoard(scratch, rank)
        self.activity = Activity(rank, board)
        self._monitor = Monitor(self.activity, device, restart_count())
        self._store: StoreBoard | None = None
        self._watch: RankWatch | None = None
        if board is not None:
            self._monitor.beat(board)
            end_with_launcher(int(os.environ[LAUNCHER_VARIABLE]))

    def watch_others(self, world: int, token: str, launch: LaunchConfig) -> None:
        """Give signs of life in the store of torchrun; the ranks then `start_watch`, when all have."""
        limits = WatchLimits.of(launch)
        self._store = StoreBoard(self.activity.rank, world, token, launch.freeze_seconds)
        self._watch = RankWatch(self._store, limits, self.activity.rank, _end)
        self._monitor.beat(self._store)

    def start_watch(self) -> None:
        """Watch other ranks from now on."""
        if self._watch is not None:
            self._watch.start()

    def publish(self, run_dir: Path) -> None:
        """Keep the status file in the run's directory from now on."""
        self._monitor.publish(run_dir)

    def leave(self, error: object) -> None:
        """Begin to end this rank; tell the others of a failure that they may not know of."""
        if isinstance(error, BaseException):
            if isinstance(error, Exception) and not isinstance(error, UserError | RunError):
                setattr(error, PLACE, self.activity.place)
            self._tell(error)
        else:
            self.activity.enter("end")

    def close(self) -> None:
        """Watch others no longer, nor be missed by them. Signs of life go on as long as the process does."""
        if self._watch is not None:
            self._watch.stop()
        self._monitor.close()

    def _tell(self, error: BaseException) -> None:
        shared = isinstance(error, UserError | RunError) and not (
            isinstance(error, UserCodeError) and error.alone
        )
        if self._store is None or shared or not isinstance(error, Exception):
            return
        # Where another one is the cause, this process ends before it reports its own failure.
        log_error(error)
        failure = describe_failure(error)
        if failure.distance == CONSEQUENCE:
            # torchrun ends by SIGTERM what one dead process leaves, which must not pass for the cause.
            with deferred_termination(PATIENCE):
                time.sleep(PATIENCE)
        self._store.convict(Verdict(self.activity.rank, failure.message, frozen=False))


def _end(message: str, mine: bool) -> None:
    """End this process at once because the run has failed; the rank that has found out says so."""
    with suppress(OSError):
        report_end(message, prints=mine)
    os._exit(RUN_STATUS)
