"""`realrl config`."""

from typing import Annotated

import typer


def config(
    algorithm: Annotated[
        str | None,
        typer.Argument(
            metavar="ALGORITHM",
            help="A name, or FILE.py or package.module of an algorithm of your own; without it, the names.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Print every field of an algorithm's recipes with its type, default and meaning, as commented YAML."""
    from realrl.recipe.describe import describe_settings
    from realrl.recipe.registry import find_algorithm, list_algorithms

    if algorithm is None:
        for name in list_algorithms():
            typer.echo(f"{name}: {find_algorithm(name)[0].about}")
        return
    spec, _ = find_algorithm(algorithm)
    typer.echo(describe_settings(spec.recipe, algorithm=algorithm), nl=False)
