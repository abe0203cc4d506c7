"""Training of a recipe as one rank of its cluster."""

import time

from realrl.checkpoint.sources import check_trainable
from realrl.config.errors import UserError
from realrl.plan.presets import SEARCH
from realrl.program.lower import WRITER
from realrl.recipe.experiment import Experiment
from realrl.runtime.observer import RunObserver
from realrl.runtime.output.earlier import EarlierRun, find_earlier_run
from realrl.runtime.output.lock import RunLock
from realrl.runtime.output.shared import check_shared
from realrl.runtime.output.trackers.trackers import check_trackers
from realrl.runtime.prepare.compile import compile_recipe, with_sizes
from realrl.runtime.prepare.devices import check_kind
from realrl.runtime.prepare.fit.check import check_fit
from realrl.runtime.processes.process import connect, resolve_cluster
from realrl.runtime.processes.signals import deferred_termination
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
    """Run a recipe as one rank of its cluster, by a `run_class` derived from TrainingRun if one is given.

    UserError for a mistake that the user can correct, RunError for a failure that is no bug.
    """
    started, written = time.monotonic(), experiment
    check_trainable(experiment)
    check_trackers(experiment)
    cluster = resolve_cluster(experiment.cluster, experiment.device)
    for_others = is_for_others(experiment, cluster)
    # Before the ranks meet, where there is nothing to search for: mistakes in a plan need no meeting.
    compiled = None if experiment.plan == SEARCH or for_others else compile_recipe(experiment, cluster)
    with connect(experiment.device, experiment.launch) as process, RunLock(experiment.run_dir) as lock:
        here = find_least_device(process)
        check_kind(experiment, cluster, here)
        earlier: EarlierRun | None = None
        with process.together():
            if process.rank == WRITER:
                lock.take()
                earlier = find_earlier_run(experiment)
        earlier = process.gather(earlier)[WRITER]
        if earlier is not None and earlier.finished:
            if process.rank == WRITER:
                observer.note(f"run_dir={experiment.run_dir} holds this run, which is done")
            return
        if for_others:
            experiment, note = replace_plan(experiment, cluster, goes_on=earlier is not None)
            if process.rank == WRITER and note:
                observer.note(note)
            compiled = None if experiment.plan == SEARCH else compile_recipe(experiment, cluster)
        if compiled is None:
            plan = agree_on_plan(experiment, cluster, process, here, observer.note)
            # What is known of models may differ between nodes.
            with process.together():
                compiled = compile_recipe(experiment, cluster, plan)
        else:
            # So may the shares that a preset gives models by their sizes.
            plan = process.gather(compiled.train.plan)[WRITER]
            with process.together():
                if plan != compiled.train.plan:
                    compiled = compile_recipe(experiment, cluster, plan)
        with process.together():
            if process.rank == WRITER:
                check_fit(experiment, with_sizes(experiment, compiled, plan), here)
        # Every rank has read everything before the directory of an earlier run may be deleted.
        with process.together():
            make = run_class or TrainingRun
            run = make(experiment, compiled, process, observer if process.rank == WRITER else None, earlier)
        check_shared(run.directory.path, process, cluster.nodes)
        # Mistakes that show without weights are found before any rank takes minutes to load some.
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
        try:
            with deferred_termination(experiment.launch.grace_seconds):
                run.execute(started)
        finally:
            run.directory.close_trackers(done=False)  # unless they are closed
