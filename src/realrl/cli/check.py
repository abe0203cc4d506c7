"""`realrl check`."""

from typing import TYPE_CHECKING, Annotated

import typer

from realrl.cli.recipe import Overrides, Recipe, resolve_recipe

if TYPE_CHECKING:
    from collections.abc import Sequence

    from realrl.data.tokenization import Row
    from realrl.recipe.experiment import Experiment
    from realrl.testing.data_probes import ProbedData
    from realrl.testing.findings import Finding

_SHOWN = 60
"""Maximum tokens shown at the beginning and at the end of a record."""
_PLAYED, _SHOWN_TRAJECTORY = 2, 300
"""Number of made-up trajectories to show, and maximum tokens shown at the beginning and at the end of each."""


def check(
    recipe: Recipe,
    overrides: Overrides = None,
    records: Annotated[int, typer.Option(min=4, help="Number of records to train with.")] = 16,
    processes: Annotated[int, typer.Option(min=2, help="Maximum number of processes of a run.")] = 4,
) -> None:
    """Check the records, the environment, the loss, the rewards and the state of a recipe, on tiny models.

    The first 1,000 records of data.train are searched for doubled or missing begin and end tokens, cut answers and
    equal pairs. An environment starts trajectories with some of these records, and answers made-up turns. Tiny
    models with random weights then train two steps: in one process and in several, with small and large
    micro-batches, again, and resumed from a checkpoint. The first number that differs is named. The gradient of the
    loss is compared with finite differences. Reward functions are called twice, in another order, and on empty and
    very long answers. Three records, or made-up trajectories, are shown with the tokens to learn. Notes are no
    mistakes for certain, and do not change the exit status. See docs/check.md.
    """
    from realrl.recipe.load import load_experiment
    from realrl.runtime.processes.environment import set_library_defaults

    set_library_defaults()
    recipe, overrides = resolve_recipe(recipe, overrides)
    if not check_experiment(load_experiment(recipe, overrides), records, processes):
        raise typer.Exit(1)


def check_experiment(experiment: "Experiment", records: int = 16, processes: int = 4) -> bool:
    """Check a recipe and print the findings. Returns whether all is well."""
    from itertools import chain
    from pathlib import Path
    from tempfile import TemporaryDirectory

    from realrl.testing.check import check_recipe
    from realrl.testing.data_probes import open_environment, probe_data, take_records
    from realrl.testing.environment_probes import probe_environment

    problems = count = 0
    taken = take_records(experiment)
    findings, shown = [], None
    environments = open_environment(experiment)
    try:
        data = probe_data(experiment, taken, environments)
        if environments is not None:
            probed = probe_environment(experiment, environments, data)
            findings, shown = [*probed.findings], probed.shown
    finally:
        if environments is not None:
            environments.close()
    with TemporaryDirectory(prefix="realrl-check-") as place:
        first = [record for _, record in taken[:records]]
        for finding in chain(
            data.findings,
            findings,
            check_recipe(
                experiment,
                first,
                Path(place),
                processes=processes,
                agents=environments is not None and environments.runs,
            ),
        ):
            _show(finding)
            count += 1
            problems += finding.problem is not None
    _show_records(data, shown)
    typer.echo(f"{count} checks, {problems or 'no'} problem{'' if problems == 1 else 's'}")
    return not problems


def _show(finding: "Finding") -> None:
    """Print a line for a finding, and lines for its likely reason and its notes."""
    if finding.problem is None:
        typer.echo(f"ok       {finding.check}")
    else:
        typer.secho(f"PROBLEM  {finding.check}: {finding.problem}", fg="red")
        if finding.reason is not None:
            typer.echo(f"         likely reason: {finding.reason}")
    for note in finding.notes:
        typer.secho(f"note     {note}", fg="yellow")


def _show_records(data: "ProbedData", played: "Sequence[tuple[str, Sequence[Row]]] | None") -> None:
    """Print the first records with the tokens to learn, or trajectories that were played with some of them."""
    from realrl.cli.data import format_item

    shown = _SHOWN_TRAJECTORY if played else _SHOWN
    for origin, rows in played[:_PLAYED] if played else data.shown:
        typer.echo(f"\n{format_item(data.tokenizer, origin, rows, shown)}")
    if played:
        typer.echo("\nthese turns of the model are made up; the turns that it samples are learnt")
    elif not any(row.answers for _, rows in data.shown for row in rows):
        typer.echo("\nthese are prompts; the answers that the model samples are learnt")
    typer.echo()
