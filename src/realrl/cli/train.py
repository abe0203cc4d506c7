"""`realrl train`."""

from functools import partial
from typing import TYPE_CHECKING

import typer

from realrl.cli.recipe import Overrides, Recipe, cluster_of

if TYPE_CHECKING:
    from realrl.config.experiment import Experiment
    from realrl.plan.cluster import Cluster
    from realrl.plan.plan import Plan


def train(recipe: Recipe, overrides: Overrides = None) -> None:
    """Run a recipe: start local processes, or take part as a rank when started by torchrun."""
    from realrl.config.load import load_experiment
    from realrl.runtime.environment import quiet_profiler, under_launcher

    quiet_profiler()
    experiment = load_experiment(recipe, overrides or [])
    if not under_launcher():
        cluster = cluster_of(experiment)
        plan = _check(experiment, cluster)
        if cluster.size > 1:
            from realrl.runtime.launch import launch

            raise typer.Exit(launch(cluster, ["train", recipe, *(overrides or [])], plan))
    from realrl.cli.progress import Progress
    from realrl.runtime.train import train as run

    with Progress() as progress:
        run(experiment, progress)


def _check(experiment: "Experiment", cluster: "Cluster") -> "Plan | None":
    """UserError for mistakes that show without reading data and models, before any process starts. For several
    processes also whether the plan fits, and first, where the recipe says so, the search for it.

    One process finds that out itself, since it may ask its GPU.
    """
    from realrl.plan.presets import SEARCH
    from realrl.runtime.compile import check_directories, check_trainable, compile_recipe, with_sizes
    from realrl.runtime.fit_check import check_fit
    from realrl.runtime.gpu import ask_machine
    from realrl.runtime.launch import check_local
    from realrl.runtime.rundir import RunDirectory
    from realrl.runtime.scenario import check_kind, search_spec
    from realrl.runtime.searched_plan import cached_plan

    check_trainable(experiment)
    searches = experiment.plan == SEARCH
    compiled = None if searches else compile_recipe(experiment, cluster)
    check_directories(experiment)
    RunDirectory(experiment.run_dir).check(experiment)
    if cluster.size == 1:
        return None
    check_local(cluster)
    here, plan = ask_machine(experiment.device), None
    check_kind(experiment, cluster, here)
    if compiled is None:
        plan = cached_plan(experiment, search_spec(experiment, cluster, here), partial(typer.echo, err=True))
        compiled = compile_recipe(experiment, cluster, plan)
    # The processes then know these sizes, too, and presets may depend on them.
    check_fit(experiment, with_sizes(experiment, compiled, plan), here)
    return plan
