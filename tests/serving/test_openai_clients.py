"""OpenAI's own package talks to the server, over a socket."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.serving.conftest import ADD, TOKEN, logprob_of

ASKED: Any = [{"role": "user", "content": "ate"}]
TOOLS: Any = [ADD]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


@pytest.fixture
def client(url: str) -> Iterator[Any]:
    with openai.OpenAI(base_url=url, api_key=TOKEN, max_retries=0, timeout=60) as made:
        yield made


def test_the_model_is_listed(client: Any) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.max_model_len) == ("tiny", 400)
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="there is no model 'other'; this server has 'tiny'"):
        client.models.retrieve("other")


def test_a_chat_is_answered(client: Any, engine: Any, tokenizer: Any) -> None:
    done = client.chat.completions.create(model="tiny", messages=ASKED, max_completion_tokens=50)
    (choice,) = done.choices
    assert (choice.message.content, choice.finish_reason) == ("the cat sat", "stop")
    expected = tokenizer.apply_chat_template(ASKED, add_generation_prompt=True, return_dict=False)
    assert engine.prompts == [expected] and expected.count(tokenizer.bos_token_id) == 1
    assert engine.options[0].max_tokens == 50
    assert done.usage.prompt_tokens == len(expected)
    assert done.usage.total_tokens == len(expected) + done.usage.completion_tokens
    assert done.usage.prompt_tokens_details.cached_tokens == len(expected) - 1
    assert choice.logprobs is None and not hasattr(done, "prompt_token_ids")


@pytest.mark.parametrize("piece_tokens", [1, 4])
def test_a_stream_adds_up_to_the_whole_answer(client: Any, engine: Any, say: Any, piece_tokens: int) -> None:
    say("née 日本 🙂 the cat")
    engine.piece_tokens = piece_tokens
    settings: Any = {"model": "tiny", "messages": ASKED, "logprobs": True, "n": 2,
                     "extra_body": {"return_token_ids": True}}  # fmt: skip
    whole = client.chat.completions.create(**settings)
    chunks = list(
        client.chat.completions.create(**settings, stream=True, stream_options={"include_usage": True})
    )
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    assert chunks[0].prompt_token_ids == whole.prompt_token_ids == engine.prompts[0]
    assert not any(hasattr(chunk, "prompt_token_ids") for chunk in chunks[1:])
    for i, choice in enumerate(whole.choices):
        news = [c for chunk in chunks for c in chunk.choices if c.index == i]
        assert news[0].delta.role == "assistant" and all(c.delta.role is None for c in news[1:])
        texts = [c.delta.content or "" for c in news]
        assert "".join(texts) == choice.message.content == "née 日本 🙂 the cat"
        assert not any("\ufffd" in text for text in texts)
        assert [token for c in news for token in c.token_ids] == choice.token_ids
        assert [entry for c in news for entry in c.logprobs.content] == choice.logprobs.content
        assert [c.finish_reason for c in news] == [None] * (len(news) - 1) + ["stop"]
    content = whole.choices[0].logprobs.content
    assert [entry.logprob for entry in content] == [logprob_of(t) for t in whole.choices[0].token_ids]
    raw = bytes(byte for entry in content[:-1] for byte in entry.bytes)
    assert raw.decode() == "née 日本 🙂 the cat"


def test_several_chats_are_answered_at_once(url: str, engine: Any, say: Any) -> None:
    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=url, api_key=TOKEN, max_retries=0, timeout=60) as client:

            async def one(stream: bool) -> str:
                if not stream:
                    done = await client.chat.completions.create(model="tiny", messages=ASKED)
                    return done.choices[0].message.content
                chunks = await client.chat.completions.create(model="tiny", messages=ASKED, stream=True)
                return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

            return await asyncio.gather(*(one(i % 2 == 0) for i in range(12)))

    assert set(asyncio.run(ask())) == {"the cat sat"}


def test_a_tool_is_called_and_its_result_answered(client: Any, engine: Any, say: Any, tokenizer: Any) -> None:
    say(f"Let me see.\n{CALL}", "the mat")
    done = client.chat.completions.create(model="tiny", messages=ASKED, tools=TOOLS, tool_choice="auto")
    message = done.choices[0].message
    assert (message.content, done.choices[0].finish_reason) == ("Let me see.", "tool_calls")
    (call,) = message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1, "b": 2})
    assert len(call.id) == 9 and call.id.isalnum()
    messages = [*ASKED, message, {"role": "tool", "tool_call_id": call.id, "content": "3"}]
    again = client.chat.completions.create(model="tiny", messages=messages, tools=TOOLS)
    assert again.choices[0].message.content == "the mat"
    assert tokenizer.decode(engine.prompts[1]).endswith(
        f"Let me see.\n{CALL}<|im_end|>\n<|im_start|>user<tool_response>\n3\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_streamed_calls_never_appear_as_text(client: Any, say: Any) -> None:
    say(f"1 < 2.\n{CALL}\n{CALL}")
    with client.chat.completions.stream(model="tiny", messages=ASKED, tools=TOOLS) as stream:
        texts = [event.delta for event in stream if event.type == "content.delta"]
        message = stream.get_final_completion().choices[0].message
    assert "".join(texts) == message.content == "1 < 2."
    assert [json.loads(call.function.arguments) for call in message.tool_calls] == [{"a": 1, "b": 2}] * 2


@pytest.mark.parametrize(
    ("text", "settings", "finish"),
    [
        (CALL, {"tool_choice": "none"}, "stop"),
        ("<tool_call>\n{name: add}\n</tool_call>", {}, "stop"),
        (CALL, {"max_tokens": 40}, "length"),
    ],
    ids=["tool_choice is none", "not JSON", "cut"],
)
def test_what_is_not_a_call_stays_text(client: Any, say: Any, text: str, settings: Any, finish: str) -> None:
    say(text)
    asked = {"model": "tiny", "messages": ASKED, "tools": TOOLS, **settings}
    (choice,) = client.chat.completions.create(**asked).choices
    assert choice.message.tool_calls is None and choice.finish_reason == finish
    assert choice.message.content and text.startswith(choice.message.content)
    chunks = list(client.chat.completions.create(**asked, stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == choice.message.content


def test_text_ends_before_a_stop_string_and_the_rest_is_not_sampled(
    client: Any, engine: Any, say: Any, encode: Any
) -> None:
    say("the cat sat on the mat")
    done = client.chat.completions.create(
        model="tiny", messages=ASKED, stop=["t on", "zebra"], extra_body={"return_token_ids": True}
    )
    choice = done.choices[0]
    assert (choice.message.content, choice.finish_reason) == ("the cat sa", "stop")
    tokens = encode("the cat sat on the mat")
    assert choice.token_ids == tokens[: len(choice.token_ids)] and len(choice.token_ids) < len(tokens)
    assert engine.cancelled == {1}
    chunks = client.chat.completions.create(model="tiny", messages=ASKED, stop="t on", stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "the cat sa"
    done = client.chat.completions.create(
        model="tiny", messages=ASKED, stop="t on", extra_body={"min_tokens": 50}
    )
    assert done.choices[0].message.content == "the cat sat on the mat"


def test_texts_and_tokens_are_continued(
    client: Any, engine: Any, say: Any, tokenizer: Any, encode: Any
) -> None:
    say(" a dog")
    ids = encode("the cat")
    done = client.completions.create(
        model="tiny", prompt=["the mat", "the cat"], n=2, seed=7, logprobs=1, max_tokens=30,
        extra_body={"return_token_ids": True},
    )  # fmt: skip
    bos = tokenizer.bos_token_id
    assert [choice.text for choice in done.choices] == [" a dog"] * 4
    assert [choice.index for choice in done.choices] == [0, 1, 2, 3]
    assert done.choices[2].prompt_token_ids == [bos, *ids] == engine.prompts[3]
    assert [options.seed for options in engine.options] == [7, 8, 7, 8]
    logprobs = done.choices[0].logprobs
    assert logprobs.token_logprobs == [logprob_of(token) for token in done.choices[0].token_ids]
    assert "".join(logprobs.tokens[:-1]) == " a dog"
    assert logprobs.text_offset == [
        0,
        *(len("".join(logprobs.tokens[:i])) for i in range(1, len(logprobs.tokens))),
    ]
    assert done.usage.prompt_tokens == len(engine.prompts[0]) + len(engine.prompts[2])
    say("!")
    for prompt, count in ((ids, 1), ([ids, ids[:1]], 2)):
        engine.prompts.clear()
        chunks = client.completions.create(model="tiny", prompt=prompt, stream=True)
        texts = [choice.text for chunk in chunks for choice in chunk.choices]
        assert "".join(texts) == "!" * count and len(engine.prompts) == count
    assert engine.prompts == [ids, ids[:1]] and engine.options[-1].max_tokens == 16


def test_a_chat_of_tokens_is_continued_as_it_is(client: Any, engine: Any, say: Any, encode: Any) -> None:
    say(CALL)
    ids = encode("the cat")
    done = client.chat.completions.create(
        model="tiny", messages=ASKED, tools=TOOLS, extra_body={"prompt_token_ids": ids}
    )
    assert engine.prompts == [ids]
    assert done.choices[0].message.tool_calls[0].function.name == "add"


def test_a_client_that_leaves_frees_its_request(client: Any, engine: Any) -> None:
    engine.endless = True
    stream = client.chat.completions.create(model="tiny", messages=ASKED, stream=True)
    next(iter(stream))
    stream.close()
    assert engine.was_cancelled.wait(60) and engine.cancelled == {1}


def test_a_client_that_leaves_before_its_whole_answer_frees_its_request(url: str, engine: Any) -> None:
    engine.endless = True

    async def leave() -> None:
        async with openai.AsyncOpenAI(base_url=url, api_key=TOKEN, max_retries=0) as client:
            asked = asyncio.ensure_future(client.chat.completions.create(model="tiny", messages=ASKED, n=2))
            while len(engine.prompts) < 2:
                await asyncio.sleep(0)
            asked.cancel()

    asyncio.run(leave())
    assert engine.was_cancelled.wait(60)


def test_an_engine_that_fails_is_an_error_with_its_message(client: Any, engine: Any) -> None:
    engine.error = "out of memory"
    for stream in (False, True):
        with pytest.raises(openai.InternalServerError, match="the engine failed: out of memory"):
            client.chat.completions.create(model="tiny", messages=ASKED, stream=stream)
    engine.error_after = 2
    with pytest.raises(openai.APIError, match="the engine failed: out of memory"):
        list(client.chat.completions.create(model="tiny", messages=ASKED, stream=True))
    engine.close()
    with pytest.raises(openai.InternalServerError, match="the engine failed: the engine is closed"):
        client.chat.completions.create(model="tiny", messages=ASKED)


def test_another_token_is_refused(url: str) -> None:
    for key in ("", "wrong", TOKEN + "x"):
        with (
            openai.OpenAI(base_url=url, api_key=key or "-", max_retries=0) as client,
            pytest.raises(openai.AuthenticationError, match="send the server's token as the API key"),
        ):
            client.models.list()
