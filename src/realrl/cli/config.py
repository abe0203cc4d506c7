"""`realrl config`."""

from typing import Annotated

import typer


def config(
    algorithm: Annotated[str, typer.Argument(help="sft, reward or ppo.", show_default=False)],
) -> None:
    """Print every field of an algorithm's recipes with its type, default and meaning, as commented YAML."""
    from realrl.recipe.describe import describe
    from realrl.recipe.load import experiment_class

    typer.echo(describe(experiment_class(algorithm)), nl=False)
