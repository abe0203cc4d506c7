"""`realrl check`."""

from typing import TYPE_CHECKING, Annotated

import typer

from realrl.cli.recipe import Overrides, Recipe, resolve_recipe

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from realrl.recipe.experiment import Experiment


def check(
    recipe: Recipe,
    overrides: Overrides = None,
    records: Annotated[int, typer.Option(min=4, help="Number of records to check with.")] = 16,
    processes: Annotated[int, typer.Option(min=2, help="Maximum number of processes of a run.")] = 4,
) -> None:
    """Check that the code of a recipe computes the same on any plan: its loss, rewards and state.

    It takes the first records of data.train and tiny models with random weights. Two steps run in one process and
    in several, with small and large micro-batches, and again. The first number that differs is named. Reward
    functions are called twice, in another order, and on empty and very long answers. See docs/check.md.
    """
    from realrl.recipe.load import load_experiment
    from realrl.runtime.processes.environment import set_library_defaults

    set_library_defaults()
    recipe, overrides = resolve_recipe(recipe, overrides)
    if not check_experiment(load_experiment(recipe, overrides), records, processes):
        raise typer.Exit(1)


def check_experiment(experiment: "Experiment", records: int = 16, processes: int = 4) -> bool:
    """Check a recipe and print the findings. Returns whether all is well."""
    from pathlib import Path
    from tempfile import TemporaryDirectory

    from realrl.testing.check import check_recipe

    problems = count = 0
    with TemporaryDirectory(prefix="realrl-check-") as place:
        for finding in check_recipe(
            experiment, take_records(experiment, records), Path(place), processes=processes
        ):
            count += 1
            if finding.problem is None:
                typer.echo(f"ok       {finding.check}")
                continue
            problems += 1
            typer.secho(f"PROBLEM  {finding.check}: {finding.problem}", fg="red")
            if finding.reason is not None:
                typer.echo(f"         likely reason: {finding.reason}")
    typer.echo(f"{count} checks, {problems or 'no'} problem{'' if problems == 1 else 's'}")
    return not problems


def take_records(experiment: "Experiment", count: int) -> "list[Mapping[str, Any]]":
    """Take the first records of `data.train`. Raises UserError if there are none."""
    from itertools import islice

    from realrl.config.errors import UserError
    from realrl.data.records import read_records
    from realrl.data.rejects import Rejects
    from realrl.recipe.sources import list_sources

    found: list[Mapping[str, Any]] = []
    for source in list_sources(experiment.data.train):
        rows = read_records(source.path, Rejects(experiment.data.on_error))
        found += [record for _, record in islice(rows, count - len(found))]
    if not found:
        raise UserError("data.train has no records to check with")
    return found
