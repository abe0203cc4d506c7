"""`realrl serve`: a model behind OpenAI's API, from the command line."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from realrl.cli.app import run_app
from realrl.huggingface.model_files import read_shape
from realrl.runtime.serve import open_engine
from tests.conftest import World

TEMPLATE = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + '</s>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


@pytest.fixture(scope="module")
def client(world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    """A client of a served model, whose server ends without an error at SIGTERM."""
    template = tmp_path_factory.mktemp("serve") / "template.jinja"
    template.write_text(TEMPLATE)
    options = ["--port", "0", "--name", "small", "--device", "cpu", "--context", "96", "--rows", "4"]
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "realrl",
            "serve",
            str(world.actor),
            *options,
            "--chat-template",
            str(template),
        ],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"REALRL_API_KEY": "secret", "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    first, second = process.stdout.readline(), process.stdout.readline()
    assert first.startswith("small at http://127.0.0.1:") and first.endswith("up to 96 tokens\n")
    assert second == "API key: the value of REALRL_API_KEY\n"
    yield openai.OpenAI(base_url=first.split()[2].rstrip(","), api_key="secret", max_retries=0)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0


def test_greedy_tokens_of_a_chat_are_those_of_transformers(client: openai.OpenAI, world: World) -> None:
    messages = [{"role": "user", "content": "a cat sat"}]
    tokenizer = AutoTokenizer.from_pretrained(world.tokenizer)
    prompt = tokenizer.apply_chat_template(
        messages, chat_template=TEMPLATE, add_generation_prompt=True, return_dict=False
    )
    model = AutoModelForCausalLM.from_pretrained(world.actor)
    expected = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=16)[0, len(prompt) :]
    for stream in (False, True):
        answers = client.chat.completions.create(
            model="small",
            messages=messages,  # type: ignore[arg-type]
            temperature=0,
            max_tokens=16,
            stream=stream,
            extra_body={"return_token_ids": True},
        )
        chunks = answers if stream else [answers]
        found = [token for chunk in chunks for choice in chunk.choices for token in choice.token_ids or ()]
        assert found == expected.tolist()


def test_turns_of_a_conversation_take_earlier_tokens_from_the_cache(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "a dog ate"}]
    earlier = 1
    for turn in range(3):
        answer = client.chat.completions.create(
            model="small",
            messages=messages,  # type: ignore[arg-type]
            max_tokens=6,
            seed=turn,
            extra_body={"ignore_eos": True},
        )
        usage = answer.usage
        assert usage is not None and usage.prompt_tokens_details is not None
        cached = usage.prompt_tokens_details.cached_tokens or 0
        assert cached >= earlier - 1
        earlier = usage.prompt_tokens + 6
        messages += [
            {"role": "assistant", "content": answer.choices[0].message.content or ""},
            {"role": "user", "content": "more"},
        ]


def test_clients_without_the_token_are_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
    assert [model.id for model in client.models.list()] == ["small"]


def test_the_context_is_no_longer_than_what_the_cache_holds(world: World) -> None:
    small = open_engine(
        str(world.actor),
        AutoTokenizer.from_pretrained(world.tokenizer),
        name="small",
        family=None,
        device="cpu",
        dtype="auto",
        context_tokens=None,
        rows=2,
        cache_gib=0.0002,
    )
    small.close()
    assert 2 <= small.context_tokens < read_shape(world.actor).max_positions


def test_mistakes_end_with_one_message(
    capsys: pytest.CaptureFixture[str], world: World, tmp_path: Path
) -> None:
    def say(*arguments: str) -> str:
        assert run_app(["serve", *arguments, "--device", "cpu"]) == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1
        return lines[0]

    actor = str(world.actor)
    assert "missing" in say(str(tmp_path / "missing"))
    assert "--context 100000" in say(actor, "--port", "0", "--context", "100000")
    assert "does not hold one request" in say(
        actor, "--port", "0", "--cache-gib", "0.0001", "--context", "2048"
    )
    assert "does not hold one request" in say(actor, "--port", "0", "--cache-gib", "0")
    assert "--chat-template: missing.jinja" in say(actor, "--chat-template", "missing.jinja")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"--port {port}" in say(actor, "--port", str(port))
