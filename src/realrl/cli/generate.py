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
        typer.Argument(help="Hugging Face directory of a model, or the directory of a run: its final model."),
    ],
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt; may be given several times.")] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SOURCE",
            help="Records with prompts: a file, glob, directory or data set, as data.train of a recipe; may be "
            "given several times. Rewards see their further fields.",
        ),
    ] = None,
    prompts: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="A .txt with a prompt per line; any other file is like --data."),
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
    stop_token_id: Annotated[
        list[int] | None,
        typer.Option(
            metavar="ID", help="Token that ends answers, instead of the model's own ones. May be repeated."
        ),
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on after the end of sequence, to --max-new-tokens.")
    ] = False,
    stop: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT",
            help="Text that ends an answer, which leaves it out. May be given several times.",
        ),
    ] = None,
    temperature: Annotated[float, typer.Option(help="Logits are divided by this.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Sample among the k most likely tokens; 0 for all.")] = 0,
    top_p: Annotated[
        float, typer.Option(help="Sample among the likeliest tokens of this probability.")
    ] = 1.0,
    greedy: Annotated[bool, typer.Option("--greedy", help="Take the most likely token.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same samples.")] = 1,
    n: Annotated[int, typer.Option("--n", min=1, help="Samples per prompt.")] = 1,
    reward: Annotated[
        str | None,
        typer.Option(
            metavar="REWARD",
            help="Score answers: FILE.py:FUNCTION, or YAML as `reward` of a recipe, such as "
            "'{verifier: {kind: numeric}}'.",
        ),
    ] = None,
    reward_model: Annotated[
        str | None, typer.Option(metavar="DIR", help="Score answers by this reward model.")
    ] = None,
    best: Annotated[
        bool, typer.Option("--best", help="Keep the answer with the highest score to each prompt.")
    ] = False,
    cluster: Annotated[
        str, typer.Option(help="Devices, as `cluster` of a recipe: 1x2 starts two local processes.")
    ] = "1x1",
    plan: Annotated[
        str, typer.Option(help="Plan, as `plan` of a recipe: a preset, a plan file, or search.")
    ] = "symmetric",
    family: Annotated[
        str | None,
        typer.Option(metavar="FILE.py", help="The file of a model family of your own that the model is of."),
    ] = None,
    out: Annotated[str | None, typer.Option(metavar="FILE", help="Write .jsonl records here.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a file that is there.")] = False,
) -> None:
    """Sample completions from a model, for prompts or a data set, and score them."""
    from realrl.config.errors import UserError
    from realrl.config.paths import local_path
    from realrl.runtime.processes.environment import set_library_defaults, under_launcher

    set_library_defaults()
    model_dir = _find_model(model_dir)
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
        raise UserError(
            "there is nothing to continue: give --prompt TEXT or --prompts FILE, or --data SOURCE"
        )
    if best and reward is None and reward_model is None:
        raise UserError("--best chooses by a score; give --reward or --reward-model")
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
                raise UserError(f"--out {out}: there is such a file; choose another one or give --overwrite")
        launch_ranks(recipe, context.obj)
    rows = generate_answers(job, recipe, best=best, say=lambda text: typer.echo(f"note: {text}", err=True))
    if out is not None:
        _write(local_path(out), rows)
        return
    for row in rows:
        score = f"  [{row['score']:.4g}]" if "score" in row else ""
        typer.echo(f"{typer.style(_shown(row['prompt'], chat), dim=True)}{row['completion']}{score}\n")


def _find_model(given: str) -> str:
    """Find the model of what the command was given: a model itself, or the final one of a run's directory.

    UserError if the run has not saved one.
    """
    from realrl.checkpoint.saved import CONFIG, checkpoint_path
    from realrl.config.errors import UserError
    from realrl.config.paths import local_path

    run_dir = local_path(given)
    if not (run_dir / CONFIG).is_file():
        return given
    final = checkpoint_path(run_dir, None)
    if not final.is_dir():
        raise UserError(
            f"{given} is the directory of a run without a final model; `realrl export {given} --out DIR` writes"
            " the models of its last checkpoint"
        )
    return str(final)


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
    """Read a reward as a recipe has it: the reference of a function, or YAML."""
    from realrl.config.yaml_file import parse_yaml

    return text if text.rpartition(":")[2].isidentifier() else parse_yaml(text, "--reward")


def _shown(prompt: str | list[dict[str, Any]], chat: bool) -> str:
    """Format a prompt for people; the answer of a conversation has a line of its own."""
    if isinstance(prompt, str):
        return f"{prompt}\n" if chat else prompt
    return "".join(f"{message['role']}: {message['content']}\n" for message in prompt)


def _write(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write rows to a file, atomically; RunError if there is no room for it."""
    from realrl.config.errors import RunError
    from realrl.config.files import reason_of
    from realrl.config.json_file import write_rows
    from realrl.runtime.processes.environment import is_writer

    try:
        if is_writer():
            write_rows(path, rows)
        else:
            # It takes part, and has none.
            assert not list(rows)
    except OSError as error:
        raise RunError(f"{path} cannot be written: {reason_of(error)}") from error


def _read_lines(path: str) -> "list[Record]":
    """Read a record per line of a .txt file that is not blank."""
    from realrl.config.errors import UserError
    from realrl.config.paths import local_path

    try:
        lines = local_path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    return [(f"{path}:{i}", {"prompt": line}) for i, line in enumerate(lines, 1) if line.strip()]
