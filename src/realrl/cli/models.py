"""`realrl models`."""

import json
from typing import Annotated

import typer


def print_models(
    family: Annotated[str | None, typer.Argument(help="List only this family.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one object instead of tables.")] = False,
) -> None:
    """List the model families, and the published sizes that `models.ROLE.shape` and `realrl plan` know by name."""
    from rich.console import Console
    from rich.table import Table

    from realrl.cli.page.text import format_count
    from realrl.families.registry import find_family, list_families, model_tensors
    from realrl.families.sizes import SHAPES

    families = {name: find_family(name) for name in (list_families() if family is None else (family,))}
    found = {
        name: {size: shape for size, shape in SHAPES.items() if shape.family == name} for name in families
    }
    parameters = {
        size: sum(spec.numel for spec in model_tensors(shape, "lm"))
        for sizes in found.values()
        for size, shape in sizes.items()
    }
    if as_json:
        listed = {
            name: {size: {"parameters": parameters[size], **shape.model_dump()} for size, shape in of.items()}
            for name, of in found.items()
        }
        typer.echo(json.dumps(listed))
        return
    table = Table(box=None, pad_edge=False)
    for heading in ("family", "class", "published sizes with a name"):
        table.add_column(heading, overflow="fold")
    for name, sizes in found.items():
        text = ", ".join(f"{size} ({format_count(parameters[size])})" for size in sizes)
        table.add_row(name, families[name].architectures["lm"], text or "-")
    Console().print(table)
