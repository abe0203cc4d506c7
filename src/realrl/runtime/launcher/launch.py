"""Local launcher: several processes on this machine, as torchrun would start them, again after failures."""

import signal
import sys
from collections.abc import Callable
from pathlib import Path

from realrl.config.errors import UserError
from realrl.plan.cluster import Cluster
from realrl.recipe.run_settings import LaunchConfig
from realrl.runtime.launcher.local_ranks import LocalRanks, RanksEnd, Start
from realrl.runtime.launcher.restarts import RestartCounter, Slots
from realrl.runtime.monitor.ended import STARTS_AGAIN, write_end
from realrl.runtime.monitor.note_file import NoteFile
from realrl.runtime.monitor.watch import describe_waiting
from realrl.runtime.processes.error_reports import USER_STATUS, Failure, print_failure
from realrl.runtime.processes.logs import LOGS, keep_logs
from realrl.runtime.processes.orphans import Scratch
from realrl.runtime.processes.signals import SAVING, deferred_termination, end_by_signal, stop_requested

CountDevices = Callable[[], int | None]
"""Counts the devices of this machine; None where there are none to count, as of CPUs."""
Shrink = Callable[[int], Start | None]
"""Finds how to go on with at most so many devices; None where the run cannot."""

RunOnce = Callable[[Start, int], RanksEnd]
"""Starts the processes of a run, restarted so often, and waits for their end."""


def check_local(cluster: Cluster) -> None:
    """Check that processes of this machine alone can be the cluster's devices; else UserError."""
    if cluster.nodes > 1:
        raise UserError(
            f"cluster={cluster} has {cluster.nodes} nodes, and this machine is one; `realrl launch torchrun` writes"
            " the command for each of them, `realrl launch slurm` and `kubernetes` a job, and launch.by=ray takes"
            " the nodes of a Ray cluster"
        )


def launch(start: Start, settings: LaunchConfig) -> int:
    """Run a command in local processes, once; return its exit status.

    When one process fails, the others are ended, and the first cause is printed, once. As in a shell, the status is
    128 + N where signal N ended a process. Raises Interrupted when this process is to end, after the others have.
    """
    outcome, logs = _run(start, settings, list(range(start.cluster.size)), 0, lambda: None)
    return 0 if outcome.cause is None else _report(outcome, outcome.cause, logs)


def launch_training(
    start: Start,
    settings: LaunchConfig,
    run_dir: Callable[[], Path | None],
    shrink: Shrink,
    run: RunOnce | None = None,
    seen: CountDevices = lambda: None,
) -> int:
    """Train until the run is done or cannot go on; return its exit status, as of `launch`.

    `run` starts the processes once and waits for them; by default they are local ones. `seen` counts the devices
    that are there now, where they can be counted.

    After failures that may pass it is started again, and goes on from its last checkpoint, with fewer devices where
    some are gone for good. Ranks keep their logs in `run_dir()`, which is None as long as the run has not made one.
    SIGTERM, or the first Ctrl-C, lets them finish the step and save.
    """
    restarts, slots = RestartCounter(settings.max_restarts), Slots(start.cluster.size, settings)
    with deferred_termination(settings.grace_seconds, SAVING):
        while True:
            if run is None:
                outcome, logs = _run(start, settings, slots.kept, restarts.total, run_dir)
            else:
                outcome, logs = run(start, restarts.total), _find_logs(run_dir)
            cause = outcome.cause
            if cause is None:
                return 0
            if stop_requested():
                if cause.status != 128 + signal.SIGTERM:
                    # Why nothing was saved, perhaps.
                    _say(outcome, cause.message, logs)
                end_by_signal()
            directory = run_dir()
            if not restarts.allow(cause, outcome.step):
                if directory is not None:
                    write_end(directory, cause.status, cause.message)
                return _report(outcome, cause, logs)
            again = f"{cause.message}; starting again ({_count(restarts, settings)})"
            if directory is not None:
                NoteFile(directory).add(again)
                write_end(directory, STARTS_AGAIN, again)
            _say(outcome, again, logs)
            start = _shrunken(slots, cause, restarts, outcome, shrink, seen) or start


def _run(
    start: Start, settings: LaunchConfig, slots: list[int], restart: int, run_dir: Callable[[], Path | None]
) -> tuple[RanksEnd, Path | None]:
    """Start the processes once; tell how they ended, and where their logs are."""
    with Scratch() as scratch:
        outcome = LocalRanks(scratch, settings).run(start, slots, restart)
        directory = run_dir()
        logs = None if directory is None else directory / LOGS
        mistake = (
            outcome.cause is not None and outcome.cause.status == USER_STATUS and not outcome.cause.trace
        )
        if (outcome.cause is None and logs is None) or mistake:
            return outcome, None
        return outcome, keep_logs(scratch, logs)


def _find_logs(run_dir: Callable[[], Path | None]) -> Path | None:
    directory = run_dir()
    return None if directory is None or not (directory / LOGS).is_dir() else directory / LOGS


def _shrunken(
    slots: Slots,
    cause: Failure,
    restarts: RestartCounter,
    outcome: RanksEnd,
    shrink: Shrink,
    seen: CountDevices,
) -> Start | None:
    """Find how to go on without the devices that are gone for good; None where none are, or the run cannot."""
    lost = slots.count(cause, progressed=outcome.progressed and restarts.progressed)
    left = [slot for slot in slots.kept if slot not in lost]
    reason = f"device {', '.join(map(str, lost))} has failed too often without getting further (launch.tries)"
    there = seen() if cause.device and slots.may_shrink else None
    if there is not None and there < len(left):
        # The driver has numbered those that are left anew.
        left, reason = (
            list(range(there)),
            f"there were {len(slots.kept)} devices, and torch finds {there} now",
        )
    if len(left) == len(slots.kept):
        return None
    fewer = shrink(len(left))
    if fewer is None:
        return None
    slots.keep(left[: fewer.cluster.size])
    restarts.forgive()
    print(f"note: {reason}; going on with cluster={fewer.cluster}", file=sys.stderr, flush=True)
    return fewer


def _count(restarts: RestartCounter, settings: LaunchConfig) -> str:
    return f"restart {restarts.total}, {restarts.in_vain} of {settings.max_restarts} without progress"


def _say(outcome: RanksEnd, text: str, logs: Path | None) -> None:
    """Print notes on a failure after which the run goes on."""
    notes = [] if outcome.cause is None else describe_waiting(outcome.signs, outcome.cause.rank)
    where = [] if logs is None else [f"the logs of all ranks are in {logs}"]
    for note in (*where, *notes, text):
        print(f"note: {note}", file=sys.stderr, flush=True)


def _report(outcome: RanksEnd, cause: Failure, logs: Path | None) -> int:
    """Print the failure that ends a run; return its status."""
    notes = [] if cause.status == USER_STATUS else describe_waiting(outcome.signs, cause.rank)
    print_failure(cause, logs=logs, notes=notes)
    return cause.status
