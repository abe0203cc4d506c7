"""A conversation that goes on has the tokens that were sampled, and nothing is tokenised again."""

import logging
from copy import deepcopy
from typing import Any

import pytest

from realrl.serving.conversations import ConversationMemory
from realrl.serving.prompts import Prompt, PromptWriter
from realrl.serving.requests import ChatBody
from tests.environments.test_turn_template import DROPS, TEMPLATES
from tests.serving.conftest import ADD

USER = {"role": "user", "content": "ate"}


def make_writer(tokenizer: Any, template: str, **settings: Any) -> PromptWriter:
    changed = deepcopy(tokenizer)
    changed.chat_template = template
    settings = {"memory": ConversationMemory(10_000), **settings}
    return PromptWriter(changed, stop_token_ids=[changed.eos_token_id], **settings)


def ask(writer: PromptWriter, messages: list[Any], **fields: Any) -> Prompt:
    return writer.write_chat(ChatBody(messages=messages, **fields).read_chat())


def remember(
    writer: PromptWriter, prompt: Prompt, messages: list[Any], said: Any, sampled: list[int], **fields: Any
) -> None:
    writer.remember(ChatBody(messages=messages, **fields).read_chat(), prompt, said, sampled)


def spell(tokenizer: Any, text: str) -> list[int]:
    """Tokens of single letters, which the tokenizer itself would join."""
    ids = [id for letter in text for id in tokenizer(letter, add_special_tokens=False)["input_ids"]]
    assert ids != tokenizer(text, add_special_tokens=False)["input_ids"]
    return [*ids, tokenizer.eos_token_id]


@pytest.mark.parametrize("template", ["qwen", "llama"])
def test_sampled_tokens_are_used_again_and_the_rest_is_as_the_template_writes_it(
    tokenizer: Any, template: str
) -> None:
    writer = make_writer(tokenizer, TEMPLATES[template])
    messages, tokens = [USER], list[int]()
    for text in ("the cat", "sat on"):
        prompt = ask(writer, messages)
        assert prompt.tokens[: len(tokens)] == tokens and prompt.remembered == len(tokens)
        said = {"role": "assistant", "content": text, "refusal": None}
        sampled = spell(tokenizer, text)
        remember(writer, prompt, messages, said, sampled)
        tokens = [*prompt.tokens, *sampled]
        messages = [*messages, said, {"role": "user", "content": "the mat"}]
    last = ask(writer, messages)
    assert last.tokens[: len(tokens)] == tokens
    assert tokenizer.decode(last.tokens) == last.text
    whole = make_writer(tokenizer, TEMPLATES[template], memory=None)
    assert ask(whole, messages).text == last.text and ask(whole, messages).tokens != last.tokens
    assert last.tokens.count(tokenizer.bos_token_id) == (template == "qwen")


def test_calls_are_recognised_however_their_arguments_are_written(tokenizer: Any) -> None:
    writer, tools = make_writer(tokenizer, TEMPLATES["qwen"]), [ADD]
    text = 'the cat\n<tool_call>\n{"name":"add","arguments":{"a":1,"b":2}}\n</tool_call>'
    sampled = spell(tokenizer, text)
    call = {
        "id": "a1b2c3d4e",
        "type": "function",
        "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'},
    }
    prompt = ask(writer, [USER], tools=tools)
    said = {"role": "assistant", "content": "the cat", "tool_calls": [call]}
    remember(writer, prompt, [USER], said, sampled, tools=tools)
    written = {**call, "index": 0, "function": {"name": "add", "arguments": '{"b":2,"a":1}'}}
    result = {"role": "tool", "tool_call_id": "a1b2c3d4e", "content": "3"}
    again = ask(
        writer,
        [USER, {"role": "assistant", "content": "the cat", "tool_calls": [written]}, result],
        tools=tools,
    )
    assert again.tokens[: again.remembered] == [*prompt.tokens, *sampled]
    rest = tokenizer.decode(again.tokens[again.remembered :])
    assert rest == (
        "\n<|im_start|>user<tool_response>\n3\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    other = {"role": "assistant", "content": "the cat", "tool_calls": [{**written, "id": "another00"}]}
    assert not ask(writer, [USER, other, result], tools=tools).remembered


def test_a_turn_that_was_cut_gets_its_end(tokenizer: Any) -> None:
    writer = make_writer(tokenizer, TEMPLATES["qwen"])
    prompt, said = ask(writer, [USER]), {"role": "assistant", "content": "the c"}
    sampled = spell(tokenizer, "the c")[:-1]
    remember(writer, prompt, [USER], said, sampled)
    again = ask(writer, [USER, said, USER])
    assert again.tokens[again.remembered] == tokenizer.eos_token_id
    assert tokenizer.decode(again.tokens) == again.text


@pytest.mark.parametrize(
    "change",
    [
        {"messages": [{"role": "user", "content": "sat"}]},
        {"tools": [ADD]},
        {"prompt_cache_key": "another"},
        {"said": {"role": "assistant", "content": "the mat"}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_another_conversation_is_written_as_a_whole(tokenizer: Any, change: dict[str, Any]) -> None:
    writer = make_writer(tokenizer, TEMPLATES["qwen"])
    said = {"role": "assistant", "content": "the cat"}
    prompt = ask(writer, [USER])
    remember(writer, prompt, [USER], said, spell(tokenizer, "the cat"))
    assert ask(writer, [USER, said, USER]).remembered
    messages = [*change.pop("messages", [USER]), change.pop("said", said), USER]
    found = ask(writer, messages, **change)
    assert not found.remembered
    assert found.tokens == tokenizer(found.text, add_special_tokens=False)["input_ids"]
    assert not ask(writer, [USER, said]).remembered, "no message follows"


def test_a_template_that_rewrites_a_turn_gets_the_whole_conversation_and_one_note(
    tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    for settings in ({}, {"earlier_turns": "keep"}):
        writer = make_writer(tokenizer, DROPS, **settings)
        caplog.clear()
        for text in ("<think>\nthe mat\n</think>\n\nthe cat", "the cat"):
            said, prompt = {"role": "assistant", "content": text}, ask(writer, [USER])
            remember(writer, prompt, [USER], said, spell(tokenizer, text))
            for _ in range(2):
                found = ask(writer, [USER, said, USER])
                used = bool(settings) or "<think>" not in text
                assert bool(found.remembered) == used
                assert ("the mat" in tokenizer.decode(found.tokens)) == (used and "<think>" in text)
        notes = [record.message for record in caplog.records if record.levelno == logging.WARNING]
        assert len(notes) == (not settings)


def test_the_memory_drops_what_was_not_used_for_the_longest_time() -> None:
    memory = ConversationMemory(10)
    for name in (b"a", b"b"):
        memory.keep(name, [1, 2, 3, 4], "")
    assert memory.find(b"a") is not None
    memory.keep(b"c", [1, 2, 3, 4], "")
    assert memory.find(b"b") is None and memory.find(b"a") is not None and len(memory) == 2
    memory.keep(b"a", [1, 2, 3, 4, 5, 6], "")
    assert len(memory) == 2
    memory.keep(b"d", [0] * 11, "")
    assert len(memory) == 0


def test_conversations_through_the_server_use_sampled_tokens(app: Any, engine: Any, tokenizer: Any) -> None:
    from starlette.testclient import TestClient

    from tests.serving.conftest import TOKEN

    engine.answer = lambda prompt, options: spell(tokenizer, "the cat")
    fields = {"return_token_ids": True, "n": 2}
    with TestClient(app, headers={"Authorization": f"Bearer {TOKEN}"}) as web:
        first = web.post("/v1/chat/completions", json={"messages": [USER], **fields}).json()
        messages = [USER, first["choices"][1]["message"], {"role": "user", "content": "sat"}]
        second = web.post("/v1/chat/completions", json={"messages": messages, **fields}).json()
    tokens = [*first["prompt_token_ids"], *first["choices"][1]["token_ids"]]
    assert second["prompt_token_ids"][: len(tokens)] == tokens
