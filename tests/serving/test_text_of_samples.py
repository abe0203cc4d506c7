"""Samples arrive as text token by token, and the parts are the whole."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realrl.recipe.generation import GenerationConfig
from realrl.recipe.stop_strings import StopStrings
from realrl.serving.decoding import StopFinder, TextDecoder, TokenTexts
from realrl.serving.turns import TurnReader
from tests.data.test_chat_tokenizers import KINDS, tokenizer_of
from tests.environments.test_tool_calls import TOOLS

BYTES = "bytes without BOS"
ALPHABET = "aä日🙂 \n\ufffd"


def decode(decoder: TextDecoder, tokens: Sequence[int]) -> list[str]:
    return [*(decoder.add(token) for token in tokens), decoder.finish()]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15, deadline=None)
@given(text=st.text("aä日🙂 ", max_size=12), again=st.text("ab ", max_size=5))
def test_parts_of_text_are_the_text_of_all_tokens(kind: str, text: str, again: str) -> None:
    tokenizer = tokenizer_of(kind)
    tokens = tokenizer(f"{text}hello there{again}", add_special_tokens=False)["input_ids"]
    parts = decode(TextDecoder(TokenTexts(tokenizer)), tokens)
    assert "".join(parts) == tokenizer.decode(
        tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    assert not any("\ufffd" in part for part in parts)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_bytes_are_decoded_as_a_whole(data: Any) -> None:
    tokenizer = tokenizer_of(BYTES)
    tokens = data.draw(st.lists(st.integers(0, len(tokenizer) + 4), max_size=30))
    texts = TokenTexts(tokenizer)
    known = [token for token in tokens if texts.has_text(token, False)]
    assert "".join(decode(TextDecoder(texts), tokens)) == texts.decode(known)


def test_a_continued_text_keeps_the_blank_at_its_start() -> None:
    tokenizer = tokenizer_of("metaspace before the first piece")
    tokens = tokenizer("hello there", add_special_tokens=False)["input_ids"]
    cut = next(i for i in range(1, len(tokens)) if tokenizer.decode(tokens[:i]) == "hello")
    texts = TokenTexts(tokenizer)
    assert "".join(decode(TextDecoder(texts, prompt=tokens[:cut]), tokens[cut:])) == " there"
    assert "".join(decode(TextDecoder(texts), tokens[cut:])) == "there"


@settings(max_examples=150, deadline=None)
@given(
    text=st.text("ab日", max_size=14),
    stop=st.lists(st.text("ab日", min_size=1, max_size=4), min_size=1, max_size=3),
    least=st.integers(0, 6),
)
def test_stop_strings_end_a_text_as_in_training(text: str, stop: list[str], least: int) -> None:
    tokenizer = tokenizer_of(BYTES)
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    rule = StopStrings(
        tokenizer, GenerationConfig(stop=tuple(stop), min_new_tokens=least, max_new_tokens=100)
    )
    end = rule.find_end(tokens, 0)
    expected = text if end is None else rule.cut(tokens[:end])
    decoder, finder, sent = TextDecoder(TokenTexts(tokenizer)), StopFinder(stop, least), ""
    for count, token in enumerate(tokens, 1):
        part, ends = finder.add(decoder.add(token), count)
        sent += part
        assert expected.startswith(sent), "text of a stop string was sent"
        if ends:
            break
    else:
        count = None
        sent += finder.finish() + decoder.finish()
    assert (sent, count) == (expected, end)


SPOKEN = {
    "hermes": ("Let me see.\n", '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'),
    "mistral": ("Let me see. ", '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]'),
    "llama3": ("Let me see.", '<|python_tag|>{"name": "add", "parameters": {"a": 1}}'),
    "gpt_oss": (
        "<|channel|>analysis<|message|>Adding.<|end|><|start|>assistant<|channel|>commentary<|message|>Let me see."
        "<|end|><|start|>assistant",
        '<|channel|>commentary to=functions.add<|constrain|>json<|message|>{"a": 1}',
    ),
}


def read(
    text: str, form: str | None, tools: Any, *, cut: bool = False, step: int = 1
) -> tuple[list[str], Any]:
    reader = TurnReader(form, tools)
    parts = [reader.add(text[i : i + step]) for i in range(0, len(text), step)]
    rest, calls = reader.finish(cut=cut)
    return [*parts, rest], [(call.name, call.arguments) for call in calls]


@pytest.mark.parametrize("form", SPOKEN)
@pytest.mark.parametrize("step", [1, 7, 1000])
def test_calls_are_never_sent_as_content(form: str, step: int) -> None:
    before, call = SPOKEN[form]
    if form == "gpt_oss":  # its marks are single tokens
        step = 1000
    parts, calls = read(before + call, form, TOOLS, step=step)
    assert "".join(parts) == "Let me see." and calls == [("add", {"a": 1})]
    assert parts[-1] == ""
    if step == 1 and form != "gpt_oss":
        assert parts[0] == "L", "content is sent as soon as it is known"
        parts, calls = read(call, form, TOOLS)
        assert "".join(parts) == "" and len(calls) == 1


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", "a < b, <tool, <tool_cal"),
        ("hermes", "<tool_call>{name}</tool_call> after"),
        ("hermes", "<think>I could <tool_call>{}</tool_call></think>\n\nBut no."),
        ("hermes", "I could <tool_call>{}</tool_call></think>\n\nBut no."),
        ("llama3", '{"sum": 3}'),
        ("llama3", "\n {1, 2}"),
        ("mistral", "[TOOL_CALLS] add 1 and 2"),
    ],
)
def test_text_that_is_no_call_is_content(form: str, text: str) -> None:
    assert "".join(read(text, form, TOOLS)[0]) == text
    assert read(text, form, TOOLS)[1] == []
    assert read(text, None, [])[0][:-1] == list(text), "without tools, nothing is held back"


def test_content_between_thoughts_is_sent_at_once_and_calls_after_them_are_read() -> None:
    call = SPOKEN["hermes"][1]
    parts, calls = read(f"<think>a</think>b\n{call}", "hermes", TOOLS)
    assert "".join(parts) == "<think>a</think>b" and len(calls) == 1
    assert "".join(parts[: len("<think>a")]) == "<think>a"


def test_a_turn_that_was_cut_calls_nothing() -> None:
    text = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<para"
    assert read(text, "hermes", TOOLS)[1] and "".join(read(text, "hermes", TOOLS)[0]) == ""
    parts, calls = read(text, "hermes", TOOLS, cut=True)
    assert "".join(parts) == text and calls == []


def test_gpt_oss_says_its_final_channel() -> None:
    text = "<|channel|>analysis<|message|>Two.<|end|><|start|>assistant<|channel|>final<|message|>3"
    assert "".join(read(text, "gpt_oss", [], step=1000)[0]) == "3"
    assert "".join(read("3 is it", "gpt_oss", [])[0]) == "3 is it"
    wrong = "<|channel|>commentary to=functions.add<|message|>1 + 2"
    assert "".join(read(wrong, "gpt_oss", TOOLS, step=1000)[0]) == "1 + 2"
