"""Launch a run in several processes: start the ranks, wait, find the cause of a failure, and restart them.

The ranks are processes of this machine (`local.py`) or of a Ray cluster (`on_ray.py`). This module does not import
torch. A launcher with torch would take seconds longer to start, and would occupy memory on every GPU that it
queries.
"""

import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from realrl.config.errors import UserError
from realrl.plan.cluster import Cluster
from realrl.plan.plan import Plan
from realrl.recipe.experiment import Experiment
from realrl.recipe.load import dump_experiment
from realrl.recipe.run_settings import LaunchConfig
from realrl.runtime.processes.logs import LOGS
from realrl.runtime.processes.signals import SAVING, deferred_termination, end_by_signal, stop_requested
from realrl.runtime.supervision.board import Board
from realrl.runtime.supervision.failures import (
    USER_STATUS,
    Failure,
    describe_death,
    find_first_cause,
    print_failure,
)
from realrl.runtime.supervision.heartbeat import Heartbeat
from realrl.runtime.supervision.restart_policy import RestartPolicy
from realrl.runtime.supervision.run_end import RESTARTING, NoteFile, write_end
from realrl.runtime.supervision.watchdog import Watchdog, describe_others

CHECK_EVERY = 0.5
"""Seconds between two checks of the heartbeats."""
MOMENT = 2.0
"""Seconds that the other ranks get, after one has failed, to notice the failure and report it themselves."""
DUMP = 0.3
"""Seconds that ranks get to write their stacks to their logs."""
_ASKED = (-signal.SIGTERM, 128 + signal.SIGTERM)
"""Exit statuses of ranks that have ended because the launcher asked them to."""


@dataclass(frozen=True)
class Start:
    """The command `realrl ARGUMENTS`, which starts once for each device of the cluster."""

    cluster: Cluster
    arguments: Sequence[str]
    recipe: str | None = None
    """Text of the resolved recipe with its secrets, if the command takes a recipe. Ranks read this text, not the
    user's file, also after restarts."""
    plan: str | None = None
    """Text of the plan that a search found for a recipe with `plan: search`."""
    objects: bytes | None = None
    """Functions of a script that the recipe names, serialised by `config.script_objects`."""

    @classmethod
    def of(
        cls,
        command: Sequence[str],
        experiment: Experiment,
        cluster: Cluster,
        plan: Plan | None = None,
        objects: bytes | None = None,
    ) -> "Start":
        """Create the start of a command that takes a recipe.

        `command`: the name of the command, such as `train`, and its options.
        """
        text = None if plan is None else plan.to_text(experiment.graph)
        return cls(cluster, command, dump_experiment(experiment, secrets=True), text, objects)


class Ranks(Board, Protocol):
    """The ranks of one start of a run, and the heartbeats and failures that they report.

    Call `close` at the end.
    """

    poll_seconds: float
    """Seconds between two polls."""

    def poll(self) -> Sequence[int | None]:
        """Return the exit status of each rank: minus N if signal N ended it, None while it runs."""

    def signal(self, number: int, ranks: Sequence[int]) -> None:
        """Send a signal to each of these ranks that still runs."""

    def kill(self) -> None:
        """Kill the ranks and their children."""

    def keep_logs(self, directory: Path | None) -> Path | None:
        """Save the logs of ranks that have ended, in `directory` if possible.

        Returns the directory that contains the logs.
        """

    def close(self) -> None:
        """Release everything that the ranks needed."""


StartRanks = Callable[[Start, Sequence[int], int], Ranks]
"""Function that starts ranks. Its arguments: the command, the numbers of the devices, and the number of restarts so
far."""
RunDir = Callable[[], Path | None]
"""Function that finds the run directory; None as long as the run has not created it."""
CountDevices = Callable[[], int | None]
"""Function that counts the devices of this machine; None if they cannot be counted, like CPUs."""
Shrink = Callable[[int], Start | None]
"""Function that returns the start to continue with on at most the given number of devices; None if the run cannot
continue."""


@dataclass
class Outcome:
    """How one start of the ranks ended."""

    cause: Failure | None = None
    """First cause of a failure; None if all ranks succeeded."""
    heartbeats: Mapping[int, Heartbeat] = field(default_factory=dict)
    """Heartbeats of the ranks when the first failure was noticed."""
    logs: Path | None = None
    """Directory of the logs, if they are worth reading."""

    def describe(self) -> list[str]:
        """Return notes for the screen: where the logs are, and what the other ranks were doing."""
        notes = [] if self.logs is None else [f"the logs of all ranks are in {self.logs}"]
        return notes if self.cause is None else notes + describe_others(self.heartbeats, self.cause.rank)


def check_local(cluster: Cluster) -> None:
    """Check that this machine alone can run all ranks of the cluster. Raises UserError for several nodes."""
    if cluster.nodes > 1:
        raise UserError(
            f"cluster={cluster} has {cluster.nodes} nodes, and this machine is one; `realrl launch torchrun` writes"
            " the command for each of them, `realrl launch slurm` and `kubernetes` a job, and launch.by=ray takes"
            " the nodes of a Ray cluster"
        )


def launch(start: Start, settings: LaunchConfig, start_ranks: StartRanks) -> Outcome:
    """Run a command once.

    If a process fails, all other processes are ended. If this process is asked to end, this function raises
    Interrupted after all ranks have ended.
    """
    return _run(start_ranks, start, range(start.cluster.size), 0, settings, lambda: None)


def launch_training(
    start: Start,
    settings: LaunchConfig,
    start_ranks: StartRanks,
    run_dir: RunDir,
    shrink: Shrink = lambda devices: None,
    count_devices: CountDevices = lambda: None,
) -> Outcome:
    """Train until the run is finished or cannot continue.

    After a failure that may not occur again, the run restarts from its last checkpoint, without broken devices.
    After SIGTERM or the first Ctrl-C, the run finishes the step and saves a checkpoint.
    """
    policy = RestartPolicy(start.cluster.size, settings)
    with deferred_termination(settings.grace_seconds, SAVING):
        while True:
            outcome = _run(start_ranks, start, policy.devices, policy.total, settings, run_dir)
            cause, directory = outcome.cause, run_dir()
            if cause is None:
                if directory is not None:
                    write_end(directory, 0)
                return outcome
            if stop_requested():
                if cause.status != 128 + signal.SIGTERM:
                    # The message may explain why nothing was saved.
                    _print_notes([*outcome.describe(), cause.message])
                end_by_signal()
            step = max((heartbeat.step for heartbeat in outcome.heartbeats.values()), default=0)
            finished = any(heartbeat.finished for heartbeat in outcome.heartbeats.values())
            if not policy.count(cause, step=step, finished=finished):
                if directory is not None:
                    write_end(directory, cause.status, cause.message)
                return outcome
            again = f"{cause.message}; starting again ({policy.describe()})"
            if directory is not None:
                NoteFile(directory).add(again)
                write_end(directory, RESTARTING, again)
            _print_notes([*outcome.describe(), again])
            if settings.shrink:
                start = find_smaller_start(policy, cause, shrink, count_devices) or start


def find_smaller_start(
    policy: RestartPolicy, cause: Failure, shrink: Shrink, count_devices: CountDevices
) -> Start | None:
    """Return the start on the devices that work; None if no device is broken, or if the run cannot continue."""
    broken = policy.broken_devices
    left = [device for device in policy.devices if device not in broken]
    reason = (
        f"device {', '.join(map(str, broken))} has failed too often without getting further (launch.tries)"
    )
    found = count_devices() if cause.device else None
    if found is not None and found < len(left):
        # The driver has numbered the remaining devices anew.
        left = list(range(found))
        reason = f"there were {len(policy.devices)} devices, and torch finds {found} now"
    if len(left) == len(policy.devices):
        return None
    smaller = shrink(len(left))
    if smaller is None:
        return None
    policy.shrink(left[: smaller.cluster.size])
    _print_notes([f"{reason}; continuing with cluster={smaller.cluster}"])
    return smaller


def _run(
    start_ranks: StartRanks,
    start: Start,
    devices: Sequence[int],
    restart: int,
    settings: LaunchConfig,
    run_dir: RunDir,
) -> Outcome:
    """Run all ranks once. When this returns, no process is left."""
    ranks = start_ranks(start, devices, restart)
    try:
        outcome = _wait(ranks, settings)
        ranks.kill()
        directory, cause = run_dir(), outcome.cause
        # The message about a user's mistake is complete, so the logs are not needed.
        mistake = cause is not None and cause.status == USER_STATUS and not cause.trace
        if not mistake and (cause is not None or directory is not None):
            outcome.logs = ranks.keep_logs(None if directory is None else directory / LOGS)
        return outcome
    finally:
        ranks.kill()
        ranks.close()


def _wait(ranks: Ranks, settings: LaunchConfig) -> Outcome:
    """Wait until all ranks have ended, or one has failed.

    After a failure, the other ranks get `MOMENT` seconds to report it too.
    """
    watchdog = Watchdog(settings, ranks.works)
    heartbeats: Mapping[int, Heartbeat] = {}
    failed: dict[int, tuple[int, float]] = {}
    asked: float | None = None
    first = checked = time.monotonic()
    polled = time.time()
    while True:
        before, polled = polled, time.time()
        statuses = ranks.poll()
        now = time.monotonic()
        for rank, status in enumerate(statuses):
            if status and rank not in failed:
                if not failed:
                    heartbeats, first = ranks.read_heartbeats(), now
                # Use the time of the previous poll: the rank died after it, and other ranks report consequences
                # later.
                failed[rank] = status, before
        running = [rank for rank, status in enumerate(statuses) if status is None]
        # Do not hurry ranks that end because they were asked to.
        unasked = any(asked is None or status not in _ASKED for status, _ in failed.values())
        if not running or (unasked and now - first > MOMENT):
            break
        if stop_requested():
            if asked is None:
                asked = now
                ranks.signal(signal.SIGTERM, running)
            elif now - asked > settings.grace_seconds:
                ranks.signal(signal.SIGKILL, running)
        if not failed and now - checked > CHECK_EVERY:
            checked, found = now, ranks.read_heartbeats()
            failure = watchdog.check({rank: beat for rank, beat in found.items() if rank in running})
            if failure is not None:
                _dump_stacks(ranks, [rank for rank in running if rank in found])
                return Outcome(failure, found)
        time.sleep(ranks.poll_seconds)
    if not failed:
        return Outcome()
    _dump_stacks(ranks, [rank for rank in running if rank in heartbeats])
    failures = {failure.rank: failure for failure in ranks.read_failures()}
    for rank, (status, noticed) in failed.items():
        place = heartbeats[rank].place if rank in heartbeats else None
        failures.setdefault(rank, describe_death(rank, status, noticed, place))
    return Outcome(find_first_cause(failures.values()), heartbeats)


def _dump_stacks(ranks: Ranks, running: Sequence[int]) -> None:
    """Make ranks write their stacks to their logs.

    All ranks in `running` must have sent a heartbeat, because the signal would end a rank that has not.
    """
    if running:
        ranks.signal(signal.SIGUSR1, running)
        time.sleep(DUMP)


def _print_notes(texts: Sequence[str]) -> None:
    for text in texts:
        print(f"note: {text}", file=sys.stderr, flush=True)


def report_outcome(outcome: Outcome) -> int:
    """Print the failure that ended the ranks, if any. Returns the exit status.

    As in a shell, the status is 128 + N if signal N ended a process.
    """
    cause = outcome.cause
    if cause is None:
        return 0
    notes = [] if cause.status == USER_STATUS else describe_others(outcome.heartbeats, cause.rank)
    print_failure(cause, logs=outcome.logs, notes=notes)
    return cause.status
