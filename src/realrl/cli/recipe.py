"""Arguments and functions that the commands with a recipe share."""

import json
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from realrl.plan.cluster import Cluster
    from realrl.recipe.experiment import Experiment

Recipe = Annotated[
    str, typer.Argument(help="A recipe (a YAML file), or the directory of a run.", show_default=False)
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Settings that override the recipe, for example data.batch=32; see docs/recipes.md.",
        show_default=False,
    ),
]


def resolve_recipe(given: str, overrides: Sequence[str] | None) -> tuple[str, list[str]]:
    """Return the recipe file and its overrides for a recipe or the directory of a run.

    For the directory of a run, the first overrides make the command use and resume this run. Raises UserError for
    a directory without a run.
    """
    from realrl.checkpoint.saved import CONFIG
    from realrl.config.errors import UserError
    from realrl.config.paths import local_path

    directory = local_path(given)
    if not directory.is_dir():
        return given, [*(overrides or [])]
    if not (directory / CONFIG).is_file():
        raise UserError(f"{given} is a directory without a run; give a recipe or the directory of a run")
    # The saved recipe may say `overwrite: true` from the first start; now the run has to resume.
    started = [f"run_dir={json.dumps(given)}", "overwrite=false", "resume=auto"]
    return str(directory / CONFIG), [*started, *(overrides or [])]


def find_cluster(experiment: "Experiment") -> "Cluster":
    """Find the cluster of a recipe. Only `auto` imports torch, to count GPUs."""
    from realrl.runtime.prepare.cluster import written_cluster

    cluster = written_cluster(experiment.cluster)
    if cluster is not None:
        return cluster
    from realrl.runtime.processes.process import resolve_cluster

    return resolve_cluster(experiment.cluster, experiment.device)


def find_training_cluster(experiment: "Experiment") -> "Cluster":
    """Find the cluster that a recipe trains on.

    For `auto` on CPUs, the planner chooses the number of processes, and a note explains the choice.
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
    """Print a note if there are more processes than cores. Raises UserError if the host memory is too small."""
    from realrl.runtime.prepare.host import describe_crowd

    crowd = describe_crowd(cluster.size)
    if crowd is not None:
        typer.echo(f"note: {crowd}", err=True)


def launch_ranks(experiment: "Experiment", arguments: Sequence[str]) -> None:
    """Run `realrl ARGUMENTS` in one local process per device, and exit with their status.

    Returns at once if the cluster has one device: this process then computes itself. It searches for the plan first
    if the recipe says `plan: search`. Do not call it in a process that a launcher started. Raises UserError if this
    machine cannot run the cluster.
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
