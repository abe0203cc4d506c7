"""`realrl tokenizer`."""

from typing import Annotated

import typer


def tokenizer(
    data: Annotated[str, typer.Argument(help="Records to train on, as in data.train.")],
    out: Annotated[str, typer.Option(metavar="DIR", help="Directory to write the tokenizer to.")],
    vocab_size: Annotated[int, typer.Option(help="Number of tokens, special tokens included.")] = 32000,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a tokenizer that the directory already has.")
    ] = False,
) -> None:
    """Train a byte-level BPE tokenizer on the text of a data set."""
    from realrl.config.errors import UserError
    from realrl.config.files import check_directory
    from realrl.config.paths import local_path
    from realrl.huggingface.tokenizers import train_tokenizer

    folder = local_path(out)
    check_directory(f"--out {out}", folder)
    if any((folder / name).exists() for name in ("config.json", "model.safetensors")):
        raise UserError(f"--out {out}: this directory has a model; choose another one")
    if (folder / "tokenizer.json").exists() and not overwrite:
        raise UserError(
            f"--out {out}: this directory has a tokenizer already; choose another one or give --overwrite"
        )
    size = train_tokenizer(data, str(folder), vocab_size)
    typer.echo(f"wrote a tokenizer of {size} tokens to {folder}")
