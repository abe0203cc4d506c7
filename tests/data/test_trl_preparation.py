"""Tokens and masks of records are those that TRL prepares, where it is installed."""

from typing import Any

import pytest

from realrl.data.dataset import Dataset
from realrl.data.variants import find_common_prompt

trl = pytest.importorskip("trl.data_utils")

USER = {"role": "user", "content": "the cat"}
REPLY = {"role": "assistant", "content": "sat on the mat"}
TURNS = [USER, REPLY, {"role": "user", "content": "a dog"}, {"role": "assistant", "content": "ate the cat"}]
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}</s>"
    "{% endgeneration %}{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture
def prepare(tokenizer, write, settings):
    """Tokens and loss mask of a record as they are here."""
    tokenizer.chat_template = TEMPLATE

    def prepare(record: Any) -> tuple[list[int], list[int]]:
        keys = ("tokens", "loss_mask")
        data = Dataset.load(write([record]), "answer", keys, tokenizer, settings(), 1, (1,))
        tokens, mask = (data.batch([0])[key].row(0).tolist() for key in keys)
        return tokens, mask

    return prepare


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "the cat", "completion": " sat on the mat"},
        {"prompt": "a dog ate", "completion": " the cat</s>"},
        {"prompt": [USER], "completion": [REPLY]},
        {"prompt": TURNS[:3], "completion": TURNS[3:]},
    ],
)
def test_prompts_and_completions_have_the_tokens_and_masks_of_trl(prepare, tokenizer, record):
    given = dict(record)
    if isinstance(given["prompt"], str):
        given["completion"] = given["completion"].removesuffix("</s>") + "</s>"
        prompt = trl._tokenize(tokenizer, given["prompt"])["input_ids"]
    else:
        prompt = trl._tokenize(tokenizer, given["prompt"], add_generation_prompt=True)["input_ids"]
    whole = trl._tokenize(tokenizer, given["prompt"] + given["completion"])["input_ids"]
    start = trl.common_prefix_length(prompt, whole)
    assert prepare(record) == (whole, [0] * start + [1] * (len(whole) - start))


@pytest.mark.parametrize("messages", [TURNS[:2], TURNS])
def test_messages_have_the_tokens_and_assistant_masks_of_trl(prepare, tokenizer, messages):
    expected = trl._tokenize(tokenizer, messages, return_assistant_tokens_mask=True)
    assert prepare({"messages": messages}) == (expected["input_ids"], expected["assistant_masks"])


def test_texts_have_the_tokens_of_trl(prepare, tokenizer):
    tokens, mask = prepare({"text": "a dog ate the cat"})
    assert tokens == trl._tokenize(tokenizer, "a dog ate the cat</s>")["input_ids"]
    assert mask == [0, *[1] * (len(tokens) - 1)]  # nothing precedes the first token


@pytest.mark.parametrize(
    ("chosen", "rejected"),
    [
        ("the cat sat on", "the cat ate a"),
        ("Human: why?\n\nAssistant: Because.", "Human: why?\n\nAssistant: No."),
        ("\n\nHuman: a\n\nAssistant: b\n\nHuman: c", "\n\nHuman: a\n\nAssistant: b\n\nHuman: d"),
        ("line\nsat", "line\nate"),
    ],
)
def test_implicit_prompts_of_texts_end_where_those_of_trl_do(chosen, rejected):
    expected = trl.extract_prompt({"chosen": chosen, "rejected": rejected})
    end = find_common_prompt(chosen, rejected)
    assert (chosen[:end], chosen[end:], rejected[end:]) == tuple(expected.values())


def test_pairs_of_conversations_have_the_tokens_of_trl(prepare, tokenizer, write, settings):
    other = {"role": "assistant", "content": "ate the mat"}
    record = {"chosen": [*TURNS[:3], REPLY], "rejected": [*TURNS[:3], other]}
    data = Dataset.load(
        write([record]), "pair", ("chosen", "rejected"), tokenizer, settings(), 1, (1,)
    ).batch([0])
    texts = trl.apply_chat_template(trl.extract_prompt(record), tokenizer)
    for side in ("chosen", "rejected"):
        expected = tokenizer(texts["prompt"] + texts[side], add_special_tokens=False)["input_ids"]
        assert data[side].row(0).tolist() == expected


@pytest.mark.parametrize("explicit", [True, False])
def test_sides_of_several_turns_have_the_completions_of_trl(tokenizer, write, settings, explicit):
    tokenizer.chat_template = TEMPLATE
    bad = {"role": "assistant", "content": "ate the mat"}
    record: Any = {"prompt": TURNS[:1], "chosen": TURNS[1:], "rejected": [bad]}
    if not explicit:
        record = {"chosen": TURNS, "rejected": [USER, bad]}
    keys = ("chosen", "rejected", "chosen_prompt_length", "rejected_prompt_length")
    batch = Dataset.load(write([record]), "pair", keys, tokenizer, settings(), 1, (1,)).batch([0])
    split = trl.extract_prompt(record) if not explicit else record
    prompt = trl._tokenize(tokenizer, split["prompt"], add_generation_prompt=True)["input_ids"]
    for side in ("chosen", "rejected"):
        whole = trl._tokenize(tokenizer, split["prompt"] + split[side])["input_ids"]
        assert batch[side].row(0).tolist() == whole
        assert batch[f"{side}_prompt_length"].values.tolist() == [trl.common_prefix_length(prompt, whole)]
