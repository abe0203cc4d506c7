"""Shared code of commands that take a recipe."""

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from realrl.plan.cluster import Cluster
    from realrl.recipe.experiment import Experiment

Recipe = Annotated[str, typer.Argument(help="A recipe: YAML file.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Fields to set on top of the recipe, for example data.batch=32; see `realrl config`.",
        show_default=False,
    ),
]


def find_cluster(experiment: "Experiment") -> "Cluster":
    """Find the cluster a recipe means; only `auto` needs torch, to count GPUs."""
    from realrl.runtime.prepare.cluster import written_cluster

    cluster = written_cluster(experiment.cluster)
    if cluster is not None:
        return cluster
    from realrl.runtime.processes.process import resolve_cluster

    return resolve_cluster(experiment.cluster, experiment.device)
