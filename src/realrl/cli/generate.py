"""`realrl generate`."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from realrl.data.sources.records import Record


def generate(
    model_dir: Annotated[str, typer.Argument(help="Hugging Face directory of a model.")],
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt; may be given several times.")] = None,
    prompts: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="A .txt with a prompt per line, or {prompt} or {messages} records."
        ),
    ] = None,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat",
            help="Write prompts of plain text with the tokenizer's chat template, as a user turn; without it "
            "they are used as they stand. Messages always take the template.",
        ),
    ] = False,
    max_new_tokens: Annotated[int, typer.Option(help="Stop after this many tokens.")] = 128,
    min_new_tokens: Annotated[int, typer.Option(help="Do not end before this many tokens.")] = 0,
    temperature: Annotated[float, typer.Option(help="Logits are divided by this.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Sample among the k most likely tokens; 0 for all.")] = 0,
    top_p: Annotated[
        float, typer.Option(help="Sample among the likeliest tokens of this probability.")
    ] = 1.0,
    greedy: Annotated[bool, typer.Option("--greedy", help="Take the most likely token.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same samples.")] = 1,
    n: Annotated[int, typer.Option("--n", min=1, help="Samples per prompt.")] = 1,
    family: Annotated[
        str | None,
        typer.Option(metavar="FILE.py", help="The file of a model family of your own that the model is of."),
    ] = None,
    out: Annotated[str | None, typer.Option(metavar="FILE", help="Write .jsonl records here.")] = None,
) -> None:
    """Sample completions from a model."""
    from pydantic import ValidationError

    from realrl.config.errors import UserError
    from realrl.config.explain import explain
    from realrl.config.paths import local_path
    from realrl.recipe.settings import GenerationConfig

    try:
        sampling = GenerationConfig(
            max_new_tokens=max_new_tokens,
            min_new_tokens=min_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            greedy=greedy,
        )
    except ValidationError as error:
        raise UserError(explain(error, GenerationConfig)) from None
    records = [(f"--prompt {text!r}", {"prompt": text}) for text in prompt or []]
    records += _read_prompts(prompts) if prompts else []
    if not records:
        raise UserError("there is nothing to continue: give --prompt TEXT or --prompts FILE")
    from realrl.runtime.sampling import generate_text

    rows = generate_text(
        model_dir,
        records,
        sampling,
        seed,
        n,
        chat=chat,
        family=family,
        say=lambda text: typer.echo(f"note: {text}", err=True),
    )
    if out is None:
        for row in rows:
            typer.echo(f"{typer.style(_shown(row['prompt'], chat), dim=True)}{row['completion']}\n")
    else:
        _write(local_path(out), (json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def _shown(prompt: str | list[dict[str, Any]], chat: bool) -> str:
    """Format a prompt for people; the answer of a conversation has a line of its own."""
    if isinstance(prompt, str):
        return f"{prompt}\n" if chat else prompt
    return "".join(f"{message['role']}: {message['content']}\n" for message in prompt)


def _write(path: Path, lines: Iterable[str]) -> None:
    """Open a file for atomic writing.

    UserError, before the first line, where it cannot be written; RunError if there is no room for it.
    """
    from realrl.config.errors import RunError
    from realrl.config.files import check_file, reason_of, whole_file

    check_file(str(path), path)
    try:
        with whole_file(path) as partial, partial.open("w", encoding="utf-8") as file:
            file.writelines(lines)
    except OSError as error:
        raise RunError(f"{path} cannot be written: {reason_of(error)}") from error


def _read_prompts(path: str) -> "list[Record]":
    """Read a record per line of a .txt file that is not blank, or the records of a data file."""
    from realrl.config.errors import UserError
    from realrl.config.paths import local_path
    from realrl.data.sources.records import read_records
    from realrl.data.sources.rejects import Rejects

    file = local_path(path)
    if file.suffix == ".txt":
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{path} cannot be read: {error}") from None
        return [(f"{path}:{i}", {"prompt": line}) for i, line in enumerate(lines, 1) if line.strip()]
    return list(read_records(path, Rejects("fail")))
