"""Train a recipe as one rank of its cluster."""

import time
from contextlib import ExitStack

from realrl.config.errors import UserError
from realrl.engine.optional_kernels import use_kernels
from realrl.plan.presets import SEARCH
from realrl.program.lower import WRITER
from realrl.recipe.experiment import Experiment
from realrl.runtime.observer import RunObserver
from realrl.runtime.output.earlier import EarlierRun, describe_finished, find_earlier_run
from realrl.runtime.output.lock import RunLock
from realrl.runtime.output.shared_directory import check_shared
from realrl.runtime.output.tracker_threads import check_trackers
from realrl.runtime.prepare.devices import check_kind
from realrl.runtime.prepare.fit.check import check_fit
from realrl.runtime.prepare.job import make_job
from realrl.runtime.processes.process import Process, connect, resolve_cluster
from realrl.runtime.processes.signals import SAVING, deferred_termination
from realrl.runtime.processes.startup import (
    agree_on_plan,
    find_least_device,
    is_for_others,
    replace_plan,
)
from realrl.runtime.training_run import TrainingRun


def train(
    experiment: Experiment, observer: RunObserver, run_class: "type[TrainingRun] | None" = None
) -> None:
    """Train a recipe as one rank of its cluster. `run_class` may be a class derived from TrainingRun.

    Raises UserError for a mistake of the user, and RunError for a failure that is not a bug.
    """
    started, written = time.monotonic(), experiment
    check_trackers(experiment)
    cluster = resolve_cluster(experiment.cluster, experiment.device)
    for_others = is_for_others(experiment, cluster)
    # Find mistakes in a written plan before the ranks wait for each other.
    if experiment.plan != SEARCH and not for_others:
        make_job(experiment, cluster)
    with (
        ExitStack() as until_the_end,
        connect(experiment.device, experiment.launch) as process,
        RunLock(experiment.run_dir) as lock,
    ):
        here = find_least_device(process)
        check_kind(experiment, cluster, here)
        with process.together():
            until_the_end.enter_context(use_kernels(experiment.kernels, process.device))
        earlier = _find_earlier(written, process, lock)
        if earlier is not None and earlier.finished:
            if process.rank == WRITER:
                observer.note(describe_finished(experiment.run_dir))
            return
        if for_others:
            experiment, note = replace_plan(experiment, cluster, goes_on=earlier is not None)
            if process.rank == WRITER and note:
                observer.note(note)
        plan = agree_on_plan(experiment, cluster, process, here, observer.note)
        with process.together():
            job = make_job(experiment, cluster, plan, download=True)
            if process.rank == WRITER:
                check_fit(job, here)
        # Every rank reads its inputs before the directory of an earlier run can be deleted.
        with process.together():
            make = run_class or TrainingRun
            run = make(job, process, observer if process.rank == WRITER else None, earlier)
        until_the_end.callback(run.close)
        check_shared(run.directory.path, process, cluster)
        # Find mistakes in the opponent before any rank spends minutes on loading weights.
        run.evaluations.face_opponent()
        process.activity.enter("load")
        with process.together():
            run.load()
        run.restore()
        with process.together():
            if process.rank == WRITER:
                lock.take(make=True)
                if find_earlier_run(written) != earlier:
                    raise UserError(f"run_dir={experiment.run_dir}: another command has just trained there")
            run.open()
        process.publish(run.directory.path)
        # torchrun sends SIGTERM to all ranks when one has died, but this rank must still report its own error.
        until_the_end.enter_context(deferred_termination(experiment.launch.grace_seconds, SAVING))
        try:
            run.execute(started)
        finally:
            run.directory.close_trackers(done=False)  # does nothing if they are closed already


def _find_earlier(experiment: Experiment, process: Process, lock: RunLock) -> EarlierRun | None:
    """Find the run to continue, on all ranks, and lock its directory. Raises UserError like `find_earlier_run`."""
    earlier: EarlierRun | None = None
    with process.together():
        if process.rank == WRITER:
            lock.take()
            earlier = find_earlier_run(experiment)
    found: EarlierRun | None = process.gather(earlier)[WRITER]
    return found
