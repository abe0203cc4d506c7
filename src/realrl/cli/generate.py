"""`realrl generate`."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer


def generate(
    model_dir: Annotated[str, typer.Argument(help="Hugging Face directory of a model.")],
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt; may be given several times.")] = None,
    prompts: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="A .txt with a prompt per line, or records with a prompt."),
    ] = None,
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
    out: Annotated[str | None, typer.Option(metavar="FILE", help="Write .jsonl records here.")] = None,
) -> None:
    """Sample completions from a model."""
    from pydantic import ValidationError

    from realrl.config.algorithms import GenerationConfig
    from realrl.config.errors import UserError
    from realrl.config.explain import explain

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
    texts = [*(prompt or []), *(_read_prompts(prompts) if prompts else [])]
    if not texts:
        raise UserError("there is nothing to continue: give --prompt TEXT or --prompts FILE")
    from realrl.runtime.sampling import generate_text

    rows = generate_text(model_dir, texts, sampling, seed, n)
    if out is None:
        for row in rows:
            typer.echo(f"{typer.style(row['prompt'], dim=True)}{row['completion']}\n")
    else:
        _write(Path(out), (json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def _write(path: Path, lines: Iterable[str]) -> None:
    """Write a file that appears whole or not at all. UserError, before the first line, where it cannot."""
    from realrl.config.errors import UserError

    partial = path.with_name(f".{path.name}.partial")
    if path.is_dir():
        raise UserError(f"{path} cannot be written: it is a directory; name a file in it")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = partial.open("w", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from None
    try:
        with file:
            file.writelines(lines)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _read_prompts(path: str) -> list[str]:
    """One prompt per line of a .txt file, or the `prompt` of each record of a data file."""
    from realrl.config.errors import UserError
    from realrl.data.records import read_records
    from realrl.data.rejects import Rejects

    if Path(path).suffix == ".txt":
        try:
            lines = Path(path).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{path} cannot be read: {error}") from None
        return [line for line in lines if line.strip()]
    texts = []
    for origin, record in read_records(path, Rejects("fail")):
        text = record.get("prompt")
        if not isinstance(text, str):
            raise UserError(f"{origin}: a record needs a text in its field prompt")
        texts.append(text)
    return texts
