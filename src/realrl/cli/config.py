"""`realrl config`."""

from typing import Annotated

import typer


def config(
    algorithm: Annotated[
        str | None,
        typer.Argument(
            metavar="ALGORITHM",
            help="Name of an algorithm, or FILE.py or package.module of your own. Without it, list the names.",
            show_default=False,
        ),
    ] = None,
    section: Annotated[
        str | None,
        typer.Argument(
            metavar="SECTION",
            help="Print only this section or field, such as policy.kl.",
            show_default=False,
        ),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Print every setting, not only the common ones.")
    ] = False,
) -> None:
    """Print the settings of an algorithm with their types, defaults and meanings, as commented YAML.

    Without --all, it prints the settings that most people change. See docs/recipes.md.
    """
    from realrl.recipe.describe import describe_settings
    from realrl.recipe.registry import find_algorithm, list_algorithms

    if algorithm is None:
        for name in list_algorithms():
            typer.echo(f"{name}: {find_algorithm(name)[0].about}")
        return
    spec, _ = find_algorithm(algorithm)
    common = section is None and not everything
    text = describe_settings(spec.recipe, section=section, common=common, algorithm=algorithm)
    typer.echo(text, nl=False)
    if common:
        typer.echo(f"# These are the common settings; `realrl config {algorithm} --all` shows the rest.")
