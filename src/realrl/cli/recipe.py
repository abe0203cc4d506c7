"""Shared code of commands that take a recipe."""

import json
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from realrl.plan.cluster import Cluster
    from realrl.recipe.experiment import Experiment

Recipe = Annotated[
    str, typer.Argument(help="A recipe: YAML file, or the directory of a run.", show_default=False)
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Fields to set on top of the recipe, for example data.batch=32; see `realrl config`.",
        show_default=False,
    ),
]


def resolve_recipe(given: str, overrides: Sequence[str] | None) -> tuple[str, list[str]]:
    """Find the recipe file of what a command was given: a recipe, or the directory of a run.

    Returns it with the overrides; for a run's directory they begin with those that make a command use this run.
    UserError for a directory without a run.
    """
    from realrl.checkpoint.saved import CONFIG
    from realrl.config.errors import UserError
    from realrl.config.paths import local_path

    directory = local_path(given)
    if not directory.is_dir():
        return given, [*(overrides or [])]
    if not (directory / CONFIG).is_file():
        raise UserError(f"{given} is a directory without a run; give a recipe, or the directory of a run")
    # How the run was started is no setting of it: this one goes on.
    started = [f"run_dir={json.dumps(given)}", "overwrite=false", "resume=auto"]
    return str(directory / CONFIG), [*started, *(overrides or [])]


def find_cluster(experiment: "Experiment") -> "Cluster":
    """Find the cluster a recipe means; only `auto` needs torch, to count GPUs."""
    from realrl.runtime.prepare.cluster import written_cluster

    cluster = written_cluster(experiment.cluster)
    if cluster is not None:
        return cluster
    from realrl.runtime.processes.process import resolve_cluster

    return resolve_cluster(experiment.cluster, experiment.device)


def find_training_cluster(experiment: "Experiment") -> "Cluster":
    """Find the cluster that a recipe trains on: of `auto` on CPUs, as many processes as the planner chooses.

    What is chosen, and why, is printed.
    """
    from realrl.runtime.prepare.cluster import written_cluster
    from realrl.runtime.processes.environment import under_launcher

    if under_launcher() or written_cluster(experiment.cluster) is not None:
        return find_cluster(experiment)
    if experiment.device != "cpu":
        from realrl.runtime.processes.process import use_cuda

        if use_cuda(experiment.device):
            return find_cluster(experiment)
    from realrl.runtime.prepare.processes import choose_processes

    choice = choose_processes(experiment)
    typer.echo(f"note: cluster=auto chose {choice}", err=True)
    return choice.chosen.cluster


def note_crowd(cluster: "Cluster") -> None:
    """Note that processes on this machine's CPU are more than its cores; UserError if its memory is too small."""
    from realrl.runtime.prepare.host import describe_crowd

    crowd = describe_crowd(cluster.size)
    if crowd is not None:
        typer.echo(f"note: {crowd}", err=True)


def launch_ranks(experiment: "Experiment", arguments: Sequence[str]) -> None:
    """Run `realrl ARGUMENTS` in one process for each device of a recipe's cluster, and exit as they do.

    Returns where there is one device, for this process to compute itself. Called before any launcher has started
    this process. A plan that has to be searched is found first. UserError for a cluster that cannot be here.
    """
    from realrl.plan.presets import SEARCH
    from realrl.runtime.launcher.launch import Start, check_local, launch
    from realrl.runtime.launcher.local import LocalRanks
    from realrl.runtime.prepare.devices import check_kind, search_spec
    from realrl.runtime.prepare.fit.plan_cache import cached_plan
    from realrl.runtime.prepare.functions import check_functions
    from realrl.runtime.prepare.gpu import ask_machine, try_kernels

    cluster = find_cluster(experiment)
    if cluster.size == 1:
        return
    check_local(cluster)
    here = ask_machine(experiment.device)
    check_kind(experiment, cluster, here)
    try_kernels(experiment.kernels)
    if here == "cpu":
        note_crowd(cluster)
    plan = None
    if experiment.plan == SEARCH:
        check_functions(experiment)
        found = cached_plan(experiment, search_spec(experiment, cluster, here), partial(typer.echo, err=True))
        plan = found.to_text(experiment.graph)
    raise typer.Exit(launch(Start(cluster, arguments, plan), experiment.launch, LocalRanks))
