"""`realrl data`."""

import os
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from realrl.cli.recipe import Overrides, Recipe, resolve_recipe

if TYPE_CHECKING:
    from realrl.recipe.experiment import Experiment
    from realrl.runtime.inspect import Inspection


def data(
    recipe: Recipe,
    overrides: Overrides = None,
    samples: Annotated[
        int, typer.Option("--samples", min=0, help="Number of records to show of each source.")
    ] = 2,
) -> None:
    """Show the records of a recipe as a run would read them: counts, lengths, skipped records, first samples.

    The exit status is 2 if a run would refuse the records. See docs/data.md.
    """
    from realrl.config.errors import UserError
    from realrl.recipe.load import load_experiment

    recipe, overrides = resolve_recipe(recipe, overrides)
    experiment = load_experiment(recipe, overrides)
    from realrl.runtime.inspect import inspect_data, list_refused

    tokenizer, found = inspect_data(experiment, samples)
    for inspection in found:
        _show(experiment, tokenizer, inspection)
    refused = [message for inspection in found for message in list_refused(experiment, inspection)]
    if refused:
        raise UserError("; ".join(refused))


def _show(experiment: "Experiment", tokenizer: Any, inspection: "Inspection") -> None:
    from realrl.cli.reporting.records import format_counts, format_item, format_lengths

    records = inspection.data
    assert records is not None, "it has been read"
    typer.echo(typer.style(f"── data.{inspection.name} " + "─" * 60, bold=True))
    typer.echo(format_counts(records.sources))
    if inspection.name == "train":
        typer.echo(_describe_epoch(experiment, inspection))
    for note in records.notes:
        typer.echo(f"note: {note}")
    typer.echo(f"\n{format_lengths(inspection.lengths)}\n")
    typer.echo(_describe_fields(inspection))
    coloured = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    for origin, rows in inspection.first:
        typer.echo(f"\n{format_item(tokenizer, origin, rows, coloured)}")
    typer.echo()


def _describe_epoch(experiment: "Experiment", inspection: "Inspection") -> str:
    """Describe an epoch. Raises UserError if one step needs more records than an epoch has."""
    from realrl.data.order import Order

    settings, records = experiment.data, inspection.data
    assert records is not None, "it has been read"
    order = Order(
        len(records),
        settings.batch,
        experiment.seed,
        settings.shuffle,
        sources=[(source.items, source.weight) for source in records.sources],
    )
    return f"an epoch takes {order.size:,} items, in {order.steps(1):,} steps of data.batch={settings.batch}"


def _describe_fields(inspection: "Inspection") -> str:
    """Describe the extra columns of the records, and the functions that see them."""
    if not inspection.fields:
        return "extra columns: none"
    fields = ", ".join(f"{name} ({count:,} records)" for name, count in inspection.fields.items())
    lines = [f"extra columns: {fields}"]
    lines += [
        f"{call} sees {', '.join(names) or 'none of them'}" for call, names in inspection.functions.items()
    ]
    if not inspection.functions:
        lines.append("no function sees them")
    return "\n".join(lines)
