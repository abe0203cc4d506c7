"""Start a training run in this process, in local processes, or on a Ray cluster.

Does not import torch before training starts in this process.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path

from realrl.checkpoint.saved import find_saved, remove_partial
from realrl.config.errors import UserError
from realrl.plan.cluster import Cluster
from realrl.plan.presets import PRESETS, SEARCH
from realrl.program.trace_file import merge_rank_traces
from realrl.recipe.experiment import Experiment
from realrl.runtime.launcher.checks import check_training
from realrl.runtime.launcher.launch import Outcome, RunDir, Start, launch_training
from realrl.runtime.launcher.local import LocalRanks
from realrl.runtime.observer import RunObserver
from realrl.runtime.output.earlier import describe_finished, find_earlier_run
from realrl.runtime.output.lock import check_unused
from realrl.runtime.output.rundir import RunDirectory
from realrl.runtime.output.tracker_threads import check_trackers
from realrl.runtime.prepare.cluster import named_cluster, written_cluster
from realrl.runtime.prepare.gpu import count_visible_gpus
from realrl.runtime.prepare.job import make_job
from realrl.runtime.prepare.processes import choose_processes
from realrl.runtime.processes.environment import is_debugged, is_writer, under_launcher
from realrl.runtime.processes.signals import Interrupted, find_interruption
from realrl.runtime.supervision.failures import describe_failure
from realrl.runtime.supervision.orphans import SCRATCH_VARIABLE
from realrl.runtime.supervision.run_end import write_end

MakeObserver = Callable[[], AbstractContextManager[RunObserver]]
"""Function that creates the observer of a run in this process."""


def start_training(
    experiment: Experiment,
    observe: MakeObserver,
    say: Callable[[str], None],
    *,
    here: bool = False,
    objects: Callable[[], bytes] | None = None,
) -> Outcome:
    """Train a recipe, or resume its run. Returns how the started processes ended.

    In a process that a launcher has started, this function trains as one rank. Otherwise it starts a local process
    for each device, or actors on a Ray cluster. With `here`, this process trains itself if only one process is
    needed. `say` is called with notes. `objects` packs the functions that a script sends to started processes.
    Raises UserError or RunError if training in this process fails.
    """
    if not experiment.spec.trains:
        raise UserError(f"algorithm={experiment.algorithm} trains no model; run it with realrl eval")
    with _tidied(experiment) as run_dir:
        if not under_launcher():
            check_unused(experiment.run_dir)
            check_trackers(experiment)
            earlier = find_earlier_run(experiment)
            if earlier is not None and earlier.finished:
                say(describe_finished(experiment.run_dir))
                return Outcome()
            if experiment.launch.by == "ray":
                return _train_on_ray(experiment, run_dir, None if objects is None else objects())
            cluster = find_training_cluster(experiment, say)
            plan = check_training(experiment, cluster, say)
            # A single process also gets a launcher, which restarts it and reports why it died. A debugger, however,
            # follows only this process.
            if cluster.size > 1 or not (here or is_debugged()):
                packed = None if objects is None else objects()
                return launch_training(
                    Start.of(["train"], experiment, cluster, plan, packed),
                    experiment.launch,
                    LocalRanks,
                    run_dir,
                    partial(_shrink, experiment, say, packed),
                    partial(count_visible_gpus, experiment.device),
                )
        from realrl.runtime.train import train

        with observe() as observer:
            train(experiment, observer)
        if run_dir() is not None:
            _write_end(RunDirectory(experiment.run_dir).path, None)
        return Outcome()


def find_cluster(experiment: Experiment) -> Cluster:
    """Find the cluster of a recipe. Only `auto` imports torch, to count GPUs."""
    cluster = written_cluster(experiment.cluster)
    if cluster is not None:
        return cluster
    from realrl.runtime.processes.process import resolve_cluster

    return resolve_cluster(experiment.cluster, experiment.device)


def find_training_cluster(experiment: Experiment, say: Callable[[str], None]) -> Cluster:
    """Find the cluster that a recipe trains on.

    For `auto` on CPUs, the planner chooses the number of processes, and a note explains the choice.
    """
    if under_launcher() or written_cluster(experiment.cluster) is not None:
        return find_cluster(experiment)
    if experiment.device != "cpu":
        from realrl.runtime.processes.process import use_cuda

        if use_cuda(experiment.device):
            return find_cluster(experiment)
    choice = choose_processes(experiment)
    say(f"note: cluster=auto chose {choice}")
    return choice.chosen.cluster


def _train_on_ray(experiment: Experiment, run_dir: RunDir, objects: bytes | None) -> Outcome:
    """Train on the nodes of a Ray cluster. The ranks themselves search for the plan."""
    from realrl.runtime.launcher.on_ray import connect_to_ray

    cluster = written_cluster(experiment.cluster)
    if cluster is None:
        raise UserError(
            "launch.by=ray: cluster=auto does not say how many nodes to use; set it, for example, to 2x8"
        )
    if experiment.plan != SEARCH:
        make_job(experiment, cluster)
    named = named_cluster(experiment.cluster)
    cpus = named is not None and all(group.device.cpu for group in named.groups)
    gpus = {"cpu": False, "cuda": True, "auto": None}[experiment.device] if not cpus else False
    start_ranks = connect_to_ray(cluster, gpus=gpus, settings=experiment.launch)
    start = Start.of(["train"], experiment, cluster, objects=objects)
    return launch_training(start, experiment.launch, start_ranks, run_dir)


@contextmanager
def _tidied(experiment: Experiment) -> Iterator[RunDir]:
    """Clean up after the run that the block trains.

    Afterwards, half-written files are gone, and the message of an interruption names the saved step. Yields a
    function that returns the run's directory, or None until the run has created it.
    """
    directory = RunDirectory(experiment.run_dir)
    graph = experiment.graph
    before = directory.mark()

    def run_dir() -> Path | None:
        return directory.path if directory.mark() not in (None, before) else None

    failure: BaseException | None = None
    try:
        yield run_dir
    except BaseException as error:
        failure = error
        raise
    finally:
        interrupted = find_interruption()
        if interrupted is not None:
            interrupted.saved = "before the first step; nothing was saved"
            if run_dir() is not None:
                saved = find_saved(directory.path, [role for role in graph.roles if graph.trained(role)])
                interrupted.saved = saved.describe(experiment.training.steps)
        if is_writer() and run_dir() is not None:
            remove_partial(directory.path)
            # Keep the traces even if the run failed, because they show what led to the failure.
            with suppress(OSError):
                merge_rank_traces(directory.path)
            if (cause := interrupted or failure) is not None:
                _write_end(directory.path, cause)


def _write_end(run_dir: Path, failure: BaseException | None) -> None:
    """Write how the run ended.

    Ranks of the local launcher write nothing, because only the launcher knows the first failure, and whether it
    restarts the ranks.
    """
    if SCRATCH_VARIABLE in os.environ or not is_writer():
        return
    if failure is None:
        write_end(run_dir, 0)
    elif isinstance(failure, Interrupted):
        write_end(run_dir, failure.status, failure.message)
    elif isinstance(failure, Exception):
        described = describe_failure(failure)
        write_end(run_dir, described.status, described.message)


def _shrink(
    experiment: Experiment, say: Callable[[str], None], objects: bytes | None, devices: int
) -> Start | None:
    """Find how to restart the run on at most `devices` devices of this machine; None if it cannot.

    If the recipe's plan is a preset, the preset stays. A plan file is for other devices, so a search replaces it.
    """
    kind = experiment.cluster.rpartition(":")[0]
    plan = experiment.plan if experiment.plan in (*PRESETS, SEARCH) else SEARCH
    for size in range(devices, experiment.launch.min_devices - 1, -1):
        changed = experiment.model_copy(update={"cluster": f"{kind and kind + ':'}1x{size}", "plan": plan})
        try:
            cluster = find_cluster(changed)
            found = check_training(changed, cluster, say)
        except UserError as error:
            say(f"note: the run cannot continue on {size} devices: {error}")
            continue
        if plan != experiment.plan:
            say(f"note: {experiment.plan} is for other devices; a search found a plan for {size}")
        return Start.of(["train"], changed, cluster, found, objects)
    return None
