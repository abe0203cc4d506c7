"""`realrl tokenizer`."""

from pathlib import Path
from typing import Annotated

import typer


def tokenizer(
    data: Annotated[str, typer.Argument(help="Records to train on, as in data.train.")],
    out: Annotated[str, typer.Option(metavar="DIR", help="Directory to write the tokenizer to.")],
    vocab_size: Annotated[int, typer.Option(help="Number of tokens, special ones included.")] = 32000,
) -> None:
    """Train a byte-level BPE tokenizer on the text of a data set."""
    from realrl.data.tokenizer import record_texts, save_tokenizer, train_bpe

    trained = train_bpe(record_texts(data), vocab_size)
    save_tokenizer(trained, Path(out))
    typer.echo(f"wrote a tokenizer of {len(trained)} tokens to {out}")
