"""`realrl serve`."""

import os
import secrets
from typing import Annotated, Literal

import typer

from realrl.config.errors import UserError

TOKEN_VARIABLE = "REALRL_API_KEY"
"""Environment variable with the token that clients must send."""


def serve(
    model_dir: Annotated[
        str,
        typer.Argument(
            help="Hugging Face directory or hub name of a model, or the directory of a run with a final model."
        ),
    ],
    name: Annotated[
        str | None, typer.Option(help="Name of the model for clients; default: the name of its directory.")
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on. The default is reached only from this machine.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="Port to listen on; 0 for any free one.", min=0, max=65535)
    ] = 8000,
    no_token: Annotated[
        bool,
        typer.Option(
            "--no-token",
            help="Let everybody in who reaches the server. Otherwise clients send a token as API key: the value of"
            f" {TOKEN_VARIABLE}, or one that the server makes and prints.",
        ),
    ] = False,
    context: Annotated[
        int | None,
        typer.Option(
            metavar="TOKENS",
            min=2,
            help="Maximum tokens of prompt and answer; default: the model's maximum, or what the cache holds.",
        ),
    ] = None,
    rows: Annotated[
        int, typer.Option(min=1, max=512, help="Maximum samples that are computed at the same time.")
    ] = 64,
    cache_gib: Annotated[
        float | None,
        typer.Option(
            metavar="GIB",
            min=0,
            help="Size of the KV cache; default: 2 on a CPU, and most of the free memory of a GPU.",
        ),
    ] = None,
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option(help="`auto` is the first GPU, or else the CPU.")
    ] = "auto",
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        typer.Option(help="`auto` is float32 on a CPU, and the type of the model's files on a GPU."),
    ] = "auto",
    chat_template: Annotated[
        str | None, typer.Option(metavar="FILE", help="Chat template to use in place of the model's own.")
    ] = None,
    tool_format: Annotated[
        Literal["auto", "hermes", "llama3", "mistral", "gpt_oss"],
        typer.Option(help="How the model writes tool calls, as in environment.tool_format of a recipe."),
    ] = "auto",
    earlier_turns: Annotated[
        Literal["template", "keep"],
        typer.Option(
            help="`keep`: continue conversations with the tokens that were sampled even if the chat template would"
            " write earlier turns differently, as in training with environment.earlier_turns=keep."
        ),
    ] = "template",
    family: Annotated[
        str | None,
        typer.Option(metavar="FILE.py", help="File of the model's family, if the family is your own."),
    ] = None,
) -> None:
    """Serve a model to clients of OpenAI's API."""
    from realrl.checkpoint.saved import find_final_model
    from realrl.config.paths import local_path
    from realrl.runtime.processes.environment import set_library_defaults

    set_library_defaults()
    try:
        from realrl.serving.listening import ApiServer, format_url, is_local, open_socket
    except ModuleNotFoundError as error:
        raise UserError(f"{error}; pip install 'realrl[serve]'") from None
    from realrl.huggingface.tokenizers import load_tokenizer
    from realrl.recipe.data import read_chat_template
    from realrl.runtime.serve import open_engine
    from realrl.serving.conversations import ConversationMemory
    from realrl.serving.endpoint import make_app
    from realrl.serving.prompts import PromptWriter

    path = find_final_model(model_dir)
    token = None if no_token else os.environ.get(TOKEN_VARIABLE) or secrets.token_urlsafe(24)
    tokenizer = load_tokenizer(path)
    if chat_template is not None:
        try:
            tokenizer.chat_template = read_chat_template(chat_template)
        except ValueError as error:
            raise UserError(f"--chat-template: {error}") from None
    listening = open_socket(host, port)
    engine = open_engine(
        path,
        tokenizer,
        name=name or local_path(model_dir).resolve().name,
        family=family,
        device=device,
        dtype=dtype,
        context_tokens=context,
        rows=rows,
        cache_gib=cache_gib,
    )
    try:
        writer = PromptWriter(
            tokenizer,
            stop_token_ids=engine.stop_token_ids,
            memory=ConversationMemory(4 * rows * engine.context_tokens),
            earlier_turns=earlier_turns,
            tool_format=None if tool_format == "auto" else tool_format,
        )
        app = make_app(engine, tokenizer, writer, token=token)
        typer.echo(f"{engine.name} at {format_url(listening)}, up to {engine.context_tokens:,} tokens")
        if token is None and not is_local(listening):
            typer.echo("warning: other machines can use this server without a token", err=True)
        if token is not None:
            known = TOKEN_VARIABLE in os.environ
            typer.echo(f"API key: the value of {TOKEN_VARIABLE}" if known else f"API key: {token}")
        ApiServer(app).serve_forever(listening)
    finally:
        engine.close()  # a second signal ends the server without closing it
