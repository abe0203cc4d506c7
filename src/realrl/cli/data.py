"""`realrl data`."""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any

import typer

from realrl.cli.recipe import Overrides, Recipe, resolve_recipe

if TYPE_CHECKING:
    from realrl.data.dataset import SourceCount
    from realrl.data.tokenization import Row
    from realrl.recipe.experiment import Experiment
    from realrl.runtime.inspect import Inspection, Turns

_QUANTILES = (0, 5, 25, 50, 75, 95, 99, 100)
_BINS, _BAR = 10, 40
"""Number of bars in the histogram, and characters of its longest bar."""
_SHOWN = 300
"""Maximum tokens shown at the beginning and at the end of a record."""


def data(
    recipe: Recipe,
    overrides: Overrides = None,
    samples: Annotated[
        int, typer.Option("--samples", min=0, help="Number of records to show of each source.")
    ] = 2,
) -> None:
    """Show the records of a recipe as a run would read them: counts, lengths, skipped records, first samples.

    An environment starts a trajectory for each of these samples. Its tools are listed, too.
    The exit status is 2 if a run would refuse the records. See docs/data.md.
    """
    from realrl.config.errors import UserError
    from realrl.recipe.load import load_experiment

    recipe, overrides = resolve_recipe(recipe, overrides)
    experiment = load_experiment(recipe, overrides)
    from realrl.runtime.inspect import inspect_data, list_refused

    tokenizer, found, turns = inspect_data(experiment, samples)
    for inspection in found:
        _show(experiment, tokenizer, inspection)
    if turns is not None:
        typer.echo(_format_turns(tokenizer, turns))
    refused = [message for inspection in found for message in list_refused(experiment, inspection)]
    if refused:
        raise UserError("; ".join(refused))


def _show(experiment: "Experiment", tokenizer: Any, inspection: "Inspection") -> None:
    records = inspection.data
    assert records is not None, "it has been read"
    typer.echo(_head(f"data.{inspection.name}"))
    typer.echo(_format_counts(records.sources))
    if inspection.name == "train":
        typer.echo(_describe_epoch(experiment, inspection))
    for note in records.notes:
        typer.echo(f"note: {note}")
    typer.echo(f"\n{format_lengths(inspection.lengths)}\n")
    typer.echo(_describe_fields(inspection))
    for number, (origin, rows) in enumerate(inspection.first):
        opening = inspection.openings[number] if inspection.openings else []
        if isinstance(opening, str):
            typer.echo(f"\n{format_item(tokenizer, origin, rows)}")
            typer.secho(opening, fg="red")
        else:
            typer.echo(f"\n{format_item(tokenizer, origin, rows, opening=opening)}")
    typer.echo()


def _head(title: str) -> str:
    return typer.style(f"── {title} " + "─" * 60, bold=True)


def _format_turns(tokenizer: Any, turns: "Turns") -> str:
    """Format the tools of an environment, and what stands between the turns of the model."""
    lines = [_head(turns.label)]
    if turns.runs:
        lines.append("an agent: run writes its prompts itself, so those above are not what the model gets")
    elif turns.tools is None:
        lines.append("no tools: step gets each turn of the model")
    else:
        lines += ["tools:", *(f"  {describe_tool(tool)}" for tool in turns.tools)]
    learnt = "green" if is_coloured() else "in [[ ]]"
    begin = "first prompt" if turns.runs else "first observation"
    lines.append(f"\nafter the {begin}; tokens to learn are {learnt}:")
    lines.append(_mark(tokenizer, turns.row.ids, [1, *turns.row.loss_mask[1:]], is_coloured()))
    return "\n".join(lines) + "\n"


def describe_tool(tool: Mapping[str, Any]) -> str:
    """Describe a tool by its schema: name, arguments with types, and the first line of its description.

    The names of optional arguments end with `?`.
    """
    function = tool["function"]
    parameters = function.get("parameters", {})
    arguments = ", ".join(
        f"{name}{'' if name in parameters.get('required', ()) else '?'}: {of.get('type', 'any')}"
        for name, of in parameters.get("properties", {}).items()
    )
    return f"{function['name']}({arguments}): {function.get('description', '').partition(chr(10))[0]}"


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


def _format_counts(sources: "Sequence[SourceCount]") -> str:
    """Format a table of the data sources, and the first few reasons why records of each source were skipped."""
    from realrl.cli.page.text import align_columns
    from realrl.data.order import count_drawn

    rows = [("source", "items", "malformed", "too long", "weight", "per epoch")]
    reasons = []
    for source in sources:
        counts = (source.items, source.skipped - source.too_long, source.too_long)
        items, malformed, too_long = (f"{count:,}" for count in counts)
        drawn = f"{count_drawn((source.items, source.weight)):,}"
        rows.append((source.path, items, malformed, too_long, f"{source.weight:g}", drawn))
        reasons += [f"  skipped {reason}" for reason in source.reasons]
        if source.skipped > len(source.reasons):
            reasons.append(f"  skipped {source.skipped - len(source.reasons):,} more of {source.path}")
    return "\n".join([*align_columns(rows, right=True), *reasons])


def format_lengths(lengths: dict[str, Any]) -> str:
    """Format quantiles of the token counts of each entry, and a histogram of the last entry."""
    import numpy as np

    from realrl.cli.page.text import align_columns

    rows = [("tokens", "least", *(f"{q} %" for q in _QUANTILES[1:-1]), "most", "mean")]
    for name, values in lengths.items():
        numbers = np.asarray(values)
        quantiles = np.percentile(numbers, _QUANTILES, method="inverted_cdf")
        rows.append((name, *(f"{value:,.0f}" for value in quantiles), f"{numbers.mean():,.1f}"))
    return "\n".join([*align_columns(rows, right=True), "", *_draw_histogram(name, numbers)])


def _draw_histogram(name: str, values: Any) -> Iterator[str]:
    import numpy as np

    least, most = int(values.min()), int(values.max())
    width = -(-(most - least + 1) // _BINS)
    counts = np.bincount((values - least) // width)
    digits = len(f"{most + width:,}")
    for first, count in zip(range(least, most + 1, width), counts.tolist(), strict=True):
        span = f"{first:>{digits},} to {first + width - 1:>{digits},}"
        bar = "█" * -(-count * _BAR // int(counts.max()))
        yield f"{name} {span}  {bar} {count:,}"


def is_coloured() -> bool:
    """Return whether the output is a terminal that shows colours."""
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ


def format_item(
    tokenizer: Any, origin: str, rows: "Sequence[Row]", shown: int = _SHOWN, *, opening: Sequence[int] = ()
) -> str:
    """Format an item as the model sees it. Tokens to learn are green, or in [[ ]] without colour.

    `shown`: maximum tokens at the beginning and at the end of a row. `opening`: tokens that an
    environment adds to a prompt.
    """
    coloured = is_coloured()
    names = ("chosen", "rejected") if len(rows) == 2 else [""] * len(rows)
    parts = []
    for name, row in zip(names, rows, strict=True):
        learnt = sum(row.loss_mask)
        about = f"{len(row.ids):,} tokens, {learnt:,} to learn" if row.answers else f"{len(row.ids):,} tokens"
        about += f", {len(opening):,} more from the environment" if opening else ""
        title = " ".join(filter(None, (origin, name, f"({about})")))
        ids, mask = [*row.ids, *opening], [*row.loss_mask, *[0] * len(opening)]
        text = _mark(tokenizer, ids, mask, coloured)
        if (left_out := len(ids) - 2 * shown) > 0:
            beginning, end = (
                _mark(tokenizer, ids[part], mask[part], coloured)
                for part in (slice(shown), slice(-shown, None))
            )
            text = f"{beginning}\n... {left_out:,} tokens ...\n{end}"
        parts.append(f"{typer.style(title, bold=True)}\n{text}")
    return "\n".join(parts)


def _mark(tokenizer: Any, ids: Sequence[int], mask: Sequence[int], coloured: bool) -> str:
    text = ""
    for learnt, run in groupby(zip(mask, ids, strict=True), key=lambda pair: pair[0]):
        part = tokenizer.decode([token for _, token in run])
        if coloured:
            text += typer.style(part, fg=typer.colors.GREEN) if learnt else typer.style(part, dim=True)
        else:
            text += f"[[{part}]]" if learnt else part
    return text
