"""`realrl generate`."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from realrl.cli.recipe import launch_ranks
from realrl.config.files import check_file

if TYPE_CHECKING:
    from realrl.data.records import Record
    from realrl.recipe.generation import GenerationConfig


def generate(
    context: typer.Context,
    model_dir: Annotated[
        str,
        typer.Argument(
            help="Hugging Face directory of a model, or the directory of a run with a final model."
        ),
    ],
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt; may be repeated.")] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SOURCE",
            help="Records with prompts, as in data.train of a recipe; may be repeated. See docs/data.md.",
        ),
    ] = None,
    prompts: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="A .txt file with one prompt per line; any other file is read as by --data."
        ),
    ] = None,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat",
            help="Put plain-text prompts into the chat template, as a user turn. Messages always use the template.",
        ),
    ] = False,
    max_new_tokens: Annotated[int, typer.Option(help="Stop after this many tokens.")] = 128,
    min_new_tokens: Annotated[int, typer.Option(help="Do not stop before this many tokens.")] = 0,
    stop_token_id: Annotated[
        list[int] | None,
        typer.Option(
            metavar="ID", help="Token that ends an answer, in place of the model's own. May be repeated."
        ),
    ] = None,
    ignore_eos: Annotated[
        bool,
        typer.Option("--ignore-eos", help="Continue after an end-of-sequence token, up to --max-new-tokens."),
    ] = False,
    stop: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT",
            help="Text that ends an answer and is cut off. May be repeated.",
        ),
    ] = None,
    temperature: Annotated[float, typer.Option(help="Logits are divided by this.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Sample among the k most likely tokens; 0 for all.")] = 0,
    top_p: Annotated[
        float, typer.Option(help="Sample among the likeliest tokens whose probabilities reach this sum.")
    ] = 1.0,
    greedy: Annotated[bool, typer.Option("--greedy", help="Always take the most likely token.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same samples.")] = 1,
    n: Annotated[int, typer.Option("--n", min=1, help="Samples per prompt.")] = 1,
    reward: Annotated[
        str | None,
        typer.Option(
            metavar="REWARD",
            help="Score answers with FILE.py:FUNCTION, or YAML such as '{verifier: {kind: numeric}}'. "
            "See docs/rewards.md.",
        ),
    ] = None,
    reward_model: Annotated[
        str | None, typer.Option(metavar="DIR", help="Score answers with this reward model.")
    ] = None,
    best: Annotated[
        bool, typer.Option("--best", help="Keep only the best-scored answer to each prompt.")
    ] = False,
    cluster: Annotated[
        str, typer.Option(help="Devices, as in a recipe: 1x2 starts two local processes.")
    ] = "1x1",
    plan: Annotated[
        str, typer.Option(help="Plan, as in a recipe: a preset, a plan file, or search. See docs/plans.md.")
    ] = "symmetric",
    family: Annotated[
        str | None,
        typer.Option(metavar="FILE.py", help="File of the model's family, if the family is your own."),
    ] = None,
    out: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write the answers to this .jsonl file.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing file.")] = False,
) -> None:
    """Sample completions from a model, for prompts or a data set, and score them."""
    from realrl.checkpoint.saved import find_final_model
    from realrl.config.errors import UserError
    from realrl.config.paths import local_path
    from realrl.runtime.processes.environment import set_library_defaults, under_launcher

    set_library_defaults()
    model_dir = find_final_model(model_dir)
    sampling = _read_sampling(
        max_new_tokens=max_new_tokens,
        min_new_tokens=min_new_tokens,
        stop_token_ids=stop_token_id,
        ignore_eos=ignore_eos,
        stop=stop or [],
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        greedy=greedy,
    )
    records: list[Record] = [(f"--prompt {text!r}", {"prompt": text}) for text in prompt or []]
    sources = [*(data or [])]
    if prompts is not None and local_path(prompts).suffix == ".txt":
        records += _read_lines(prompts)
    elif prompts is not None:
        sources.append(prompts)
    if not records and not sources:
        raise UserError("there is no prompt: give --prompt TEXT or --prompts FILE, or --data SOURCE")
    if best and reward is None and reward_model is None:
        raise UserError("--best needs scores; give --reward or --reward-model")
    from realrl.runtime.evaluation.generate import SamplingJob, generate_answers, make_sampling_recipe

    job = SamplingJob(
        model_dir=model_dir,
        prompts=records,
        source=sources or None,
        sampling=sampling,
        seed=seed,
        n=n,
        chat=chat,
        family=family,
        reward=None if reward is None else _read_reward(reward),
        reward_model=reward_model,
        cluster=cluster,
        plan=plan,
    )
    recipe = make_sampling_recipe(job)
    if not under_launcher():
        if out is not None:
            check_file(str(local_path(out)), local_path(out))
            if local_path(out).is_file() and not overwrite:
                raise UserError(
                    f"--out {out}: this file exists already; choose another one or give --overwrite"
                )
        launch_ranks(recipe, context.obj, recipe=False)
    rows = generate_answers(job, recipe, best=best, say=lambda text: typer.echo(f"note: {text}", err=True))
    if out is not None:
        _write(local_path(out), rows)
        return
    for row in rows:
        score = f"  [{row['score']:.4g}]" if "score" in row else ""
        typer.echo(f"{typer.style(_shown(row['prompt'], chat), dim=True)}{row['completion']}{score}\n")


def _read_sampling(**options: Any) -> "GenerationConfig":
    from pydantic import ValidationError

    from realrl.config.errors import UserError
    from realrl.config.explain import explain
    from realrl.recipe.generation import GenerationConfig

    try:
        return GenerationConfig(**options)
    except ValidationError as error:
        raise UserError(explain(error, GenerationConfig)) from None


def _read_reward(text: str) -> Any:
    """Read a reward as in a recipe: the name of a function, or YAML."""
    from realrl.config.yaml_file import parse_yaml

    return text if text.rpartition(":")[2].isidentifier() else parse_yaml(text, "--reward")


def _shown(prompt: str | list[dict[str, Any]], chat: bool) -> str:
    """Format a prompt. A chat prompt ends with a newline, so that the answer starts on a new line."""
    if isinstance(prompt, str):
        return f"{prompt}\n" if chat else prompt
    return "".join(f"{message['role']}: {message['content']}\n" for message in prompt)


def _write(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write rows to a file atomically. Raises RunError if the file cannot be written."""
    from realrl.config.errors import RunError
    from realrl.config.files import reason_of
    from realrl.config.json_file import write_rows
    from realrl.runtime.processes.environment import is_writer

    try:
        if is_writer():
            write_rows(path, rows)
        else:
            # Sampling is collective, so every rank must run the generator. Other ranks get no rows.
            assert not list(rows)
    except OSError as error:
        raise RunError(f"{path} cannot be written: {reason_of(error)}") from error


def _read_lines(path: str) -> "list[Record]":
    """Read a .txt file: each line that is not blank is a prompt."""
    from realrl.config.errors import UserError
    from realrl.config.paths import local_path

    try:
        lines = local_path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    return [(f"{path}:{i}", {"prompt": line}) for i, line in enumerate(lines, 1) if line.strip()]
