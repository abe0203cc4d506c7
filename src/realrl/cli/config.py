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
    section: Annotated[
        str | None,
        typer.Argument(
            metavar="SECTION",
            help="A section or field to print alone, such as policy.kl.",
            show_default=False,
        ),
    ] = None,
    basic: Annotated[bool, typer.Option("--basic", help="Print only what most people set.")] = False,
) -> None:
    """Print the fields of an algorithm's recipes with their types, defaults and meanings, as commented YAML."""
    from realrl.recipe.describe import describe_settings
    from realrl.recipe.registry import find_algorithm, list_algorithms

    if algorithm is None:
        for name in list_algorithms():
            typer.echo(f"{name}: {find_algorithm(name)[0].about}")
        return
    spec, _ = find_algorithm(algorithm)
    text = describe_settings(spec.recipe, section=section, basic=basic, algorithm=algorithm)
    typer.echo(text, nl=False)
