"""`realrl train`."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from realrl.cli.recipe import (
    Overrides,
    Recipe,
    find_cluster,
    find_training_cluster,
    resolve_recipe,
)
from realrl.runtime.processes.signals import Interrupted, find_interruption, handles_signals

if TYPE_CHECKING:
    from realrl.recipe.experiment import Experiment
    from realrl.runtime.launcher.launch import Start


def train(recipe: Recipe, overrides: Overrides = None) -> None:
    """Train a recipe, or resume the run in a directory.

    It starts one local process per device. Under torchrun, it is one of the ranks. See docs/runs.md.
    """
    from realrl.config.errors import UserError
    from realrl.recipe.load import load_experiment
    from realrl.runtime.launcher.checks import check_training
    from realrl.runtime.output.earlier import describe_finished, find_earlier_run
    from realrl.runtime.output.lock import check_unused
    from realrl.runtime.output.trackers import check_trackers
    from realrl.runtime.processes.environment import is_debugged, set_library_defaults, under_launcher

    set_library_defaults()
    recipe, overrides = resolve_recipe(recipe, overrides)
    experiment = load_experiment(recipe, overrides)
    if not experiment.spec.trains:
        raise UserError(f"algorithm={experiment.algorithm} trains no model; run it with realrl eval")
    with _tidied(experiment) as run_dir:
        if not under_launcher():
            check_unused(experiment.run_dir)
            check_trackers(experiment)
            if experiment.launch.by == "ray":
                raise typer.Exit(_train_on_ray(experiment, run_dir))
            earlier = find_earlier_run(experiment)
            if earlier is not None and earlier.finished:
                typer.echo(describe_finished(experiment.run_dir), err=True)
                return
            cluster = find_training_cluster(experiment)
            plan = check_training(experiment, cluster, _say)
            # One process gets a launcher, too, which restarts it and says why it died. But a debugger follows only
            # this process, and a notebook or a test calls this function.
            alone = is_debugged() or not handles_signals()
            if cluster.size > 1 or not alone:
                from realrl.runtime.launcher.launch import Start, launch_training
                from realrl.runtime.launcher.local import LocalRanks
                from realrl.runtime.prepare.gpu import count_visible_gpus

                status = launch_training(
                    Start.of(["train"], experiment, cluster, plan),
                    experiment.launch,
                    LocalRanks,
                    run_dir,
                    partial(_shrink, experiment),
                    partial(count_visible_gpus, experiment.device),
                )
                raise typer.Exit(status)
        from realrl.cli.progress.training import Progress
        from realrl.runtime.train import train as run

        with Progress() as progress:
            run(experiment, progress)


def _train_on_ray(experiment: "Experiment", run_dir: Callable[[], Path | None]) -> int:
    """Train on the nodes of a Ray cluster, and return the exit status. The ranks search for the plan themselves."""
    from realrl.config.errors import UserError
    from realrl.plan.presets import SEARCH
    from realrl.runtime.launcher.launch import Start, launch_training
    from realrl.runtime.launcher.on_ray import connect_to_ray
    from realrl.runtime.output.earlier import describe_finished, find_earlier_run
    from realrl.runtime.prepare.cluster import named_cluster, written_cluster
    from realrl.runtime.prepare.job import make_job

    cluster = written_cluster(experiment.cluster)
    if cluster is None:
        raise UserError(
            "launch.by=ray: cluster=auto does not say how many nodes to use; set it, for example, to 2x8"
        )
    earlier = find_earlier_run(experiment)
    if earlier is not None and earlier.finished:
        typer.echo(describe_finished(experiment.run_dir), err=True)
        return 0
    if experiment.plan != SEARCH:
        make_job(experiment, cluster)
    named = named_cluster(experiment.cluster)
    cpus = named is not None and all(group.device.cpu for group in named.groups)
    gpus = {"cpu": False, "cuda": True, "auto": None}[experiment.device] if not cpus else False
    start_ranks = connect_to_ray(cluster, gpus=gpus, settings=experiment.launch)
    return launch_training(Start.of(["train"], experiment, cluster), experiment.launch, start_ranks, run_dir)


@contextmanager
def _tidied(experiment: "Experiment") -> Iterator[Callable[[], Path | None]]:
    """Clean up after the run that the block trains.

    Afterwards, half-written files are gone, and the message of an interruption says which step was saved. Yields a
    function that returns the run's directory, or None until the run has created it.
    """
    from realrl.checkpoint.saved import find_saved, remove_partial
    from realrl.program.trace_file import merge_rank_traces
    from realrl.runtime.output.rundir import RunDirectory
    from realrl.runtime.processes.environment import is_writer

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
            # A failed run keeps its traces: they show what led to the failure.
            with suppress(OSError):
                merge_rank_traces(directory.path)
            _write_end(directory.path, interrupted or failure)


def _write_end(run_dir: Path, failure: BaseException | None) -> None:
    """Write how the run ended.

    Ranks of the local launcher write nothing: the launcher knows the first failure and whether it restarts them.
    """
    from realrl.runtime.supervision.failures import describe_failure
    from realrl.runtime.supervision.orphans import SCRATCH_VARIABLE
    from realrl.runtime.supervision.run_end import write_end

    if SCRATCH_VARIABLE in os.environ:
        return
    if failure is None or (isinstance(failure, typer.Exit) and not failure.exit_code):
        write_end(run_dir, 0)
    elif isinstance(failure, Interrupted):
        write_end(run_dir, failure.status, failure.message)
    elif isinstance(failure, Exception) and not isinstance(failure, typer.Exit):
        described = describe_failure(failure)
        write_end(run_dir, described.status, described.message)


def _shrink(experiment: "Experiment", devices: int) -> "Start | None":
    """Find how to restart the run on at most `devices` devices of this machine; None if it cannot.

    A preset of the recipe stays. A plan file is for other devices, so a search replaces it.
    """
    from realrl.config.errors import UserError
    from realrl.plan.presets import PRESETS, SEARCH
    from realrl.runtime.launcher.checks import check_training
    from realrl.runtime.launcher.launch import Start

    kind = experiment.cluster.rpartition(":")[0]
    plan = experiment.plan if experiment.plan in (*PRESETS, SEARCH) else SEARCH
    for size in range(devices, experiment.launch.min_devices - 1, -1):
        changed = experiment.model_copy(update={"cluster": f"{kind and kind + ':'}1x{size}", "plan": plan})
        try:
            cluster = find_cluster(changed)
            found = check_training(changed, cluster, _say)
        except UserError as error:
            _say(f"note: the run cannot continue on {size} devices: {error}")
            continue
        if plan != experiment.plan:
            _say(f"note: {experiment.plan} is for other devices; a search found a plan for {size}")
        return Start.of(["train"], changed, cluster, found)
    return None


def _say(text: str) -> None:
    typer.echo(text, err=True)
