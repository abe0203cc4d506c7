"""`realrl tokenizer`."""

from typing import Annotated

import typer


def tokenizer(
    data: Annotated[str, typer.Argument(help="Records to train on, as in data.train.")],
    out: Annotated[str, typer.Option(metavar="DIR", help="Directory to write the tokenizer to.")],
    vocab_size: Annotated[int, typer.Option(help="Number of tokens, special ones included.")] = 32000,
) -> None:
    """Train a byte-level BPE tokenizer on the text of a data set."""
    from realrl.config.files import check_directory
    from realrl.config.paths import local_path
    from realrl.data.tokenizer import train_tokenizer

    folder = local_path(out)
    check_directory(f"--out {out}", folder)
    size = train_tokenizer(data, str(folder), vocab_size)
    typer.echo(f"wrote a tokenizer of {size} tokens to {folder}")
