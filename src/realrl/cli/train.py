"""`realrl train`."""

import typer

from realrl.cli.recipe import Overrides, Recipe, cluster_of


def train(recipe: Recipe, overrides: Overrides = None) -> None:
    """Run a recipe: start local processes, or take part as a rank when started by torchrun."""
    from realrl.config.load import load_experiment
    from realrl.runtime.environment import under_launcher

    experiment = load_experiment(recipe, overrides or [])
    if not under_launcher():
        from realrl.runtime.compile import check_directories, compile_recipe
        from realrl.runtime.rundir import RunDirectory

        cluster = cluster_of(experiment)
        # Mistakes that show without reading data and models show before any process starts.
        compile_recipe(experiment, cluster)
        check_directories(experiment)
        RunDirectory(experiment.run_dir).check(experiment)
        if cluster.size > 1:
            from realrl.runtime.launch import launch

            raise typer.Exit(launch(cluster, ["train", recipe, *(overrides or [])]))
    from realrl.cli.progress import Progress
    from realrl.runtime.train import train as run

    with Progress() as progress:
        run(experiment, progress)
