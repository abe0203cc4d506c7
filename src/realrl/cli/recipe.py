"""The arguments that commands about a recipe share."""

from typing import Annotated

import typer

Recipe = Annotated[str, typer.Argument(help="A recipe: YAML file.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Fields to set on top of the recipe, for example data.batch=32; see `realrl config`.",
        show_default=False,
    ),
]
