"""Arguments and functions that the commands with a recipe share."""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
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


def launch_ranks(experiment: "Experiment", arguments: Sequence[str], *, recipe: bool = True) -> None:
    """Run `realrl ARGUMENTS` in one local process per device, and exit with their status.

    `recipe`: whether the recipe is the first argument of the command. If the cluster has one device, the function
    returns at once, and this process computes itself. Do not call it in a process that a launcher started. Raises
    UserError if this machine cannot run the cluster.
    """
    from realrl.runtime.launcher.checks import check_start, note_crowd
    from realrl.runtime.launcher.launch import Start, launch, report_outcome
    from realrl.runtime.launcher.local import LocalRanks
    from realrl.runtime.start import find_cluster

    cluster = find_cluster(experiment)
    if cluster.size == 1:
        return
    say = partial(typer.echo, err=True)
    here, plan = check_start(experiment, cluster, say)
    note_crowd(cluster, here, say)
    start = Start.of(arguments, experiment, cluster, plan)
    outcome = launch(start if recipe else replace(start, recipe=None), experiment.launch, LocalRanks)
    raise typer.Exit(report_outcome(outcome))
