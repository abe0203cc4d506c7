"""Records that are too long lose tokens where that is asked for."""

from typing import Any

import pytest

from realrl.config.errors import UserError
from realrl.data.dataset import Dataset

KEYS = {
    "answer": ("tokens", "loss_mask"),
    "pair": ("chosen", "rejected", "chosen_prompt_length", "rejected_prompt_length"),
    "prompt": ("prompts",),
    "steps": ("tokens", "step_ends", "step_labels"),
}


@pytest.fixture
def load(tokenizer, write, settings):
    def load(form: str, record: Any, **fields: Any) -> Dataset:
        source = write([{"prompt": "a", **SHORT.get(form, {})}, record])
        return Dataset.load(source, form, KEYS[form], tokenizer, settings(**fields), 1, (1,))

    return load


SHORT = {
    "answer": {"answer": "b"},
    "pair": {"chosen": "b", "rejected": "c"},
    "steps": {"completions": ["b"], "labels": [True]},
}


def pieces(tokenizer: Any, row: Any) -> list[str]:
    return tokenizer.convert_ids_to_tokens(row.tolist())


@pytest.mark.parametrize("mode", ["keep_start", "keep_end"])
def test_prompts_to_generate_from_keep_their_end_and_beginning_of_sequence(load, tokenizer, mode):
    data = load("prompt", {"prompt": "qzxjkv"}, max_prompt_tokens=4, on_too_long=mode)
    assert pieces(tokenizer, data.batch([1])["prompts"].row(0)) == ["<s>", "j", "k", "v"]
    assert any("1 items were cut" in note and "data.jsonl:2" in note for note in data.notes)
    assert data.skipped == 0


@pytest.mark.parametrize(
    ("mode", "kept", "learnt"),
    [
        ("keep_start", ["<s>", "z", "x", "j", "k"], ["j", "k"]),
        ("keep_end", ["<s>", "j", "k", "v", "</s>"], ["j", "k", "v", "</s>"]),
    ],
)
def test_an_answer_loses_its_end_or_its_prompt_the_beginning(load, tokenizer, mode, kept, learnt):
    record = {"prompt": "qzx", "answer": "jkv"}
    batch = load("answer", record, max_tokens=5, max_prompt_tokens=3, on_too_long=mode).batch([1])
    tokens = batch["tokens"].row(0)
    assert pieces(tokenizer, tokens) == kept
    assert pieces(tokenizer, tokens[batch["loss_mask"].row(0).bool()]) == learnt


@pytest.mark.parametrize(
    ("mode", "chosen", "rejected"),
    [
        ("keep_start", ["<s>", "q", "z", "j", "k"], ["<s>", "q", "z", "v", "</s>"]),
        ("keep_end", ["<s>", "z", "j", "k", "</s>"], ["<s>", "z", "v", "</s>"]),
    ],
)
def test_the_sides_of_a_pair_keep_one_prompt(load, tokenizer, mode, chosen, rejected):
    record = {"prompt": "qz", "chosen": "jk", "rejected": "v"}
    batch = load("pair", record, max_tokens=5, on_too_long=mode).batch([1])
    assert pieces(tokenizer, batch["chosen"].row(0)) == chosen
    assert pieces(tokenizer, batch["rejected"].row(0)) == rejected
    assert batch["chosen_prompt_length"].values.tolist() == batch["rejected_prompt_length"].values.tolist()


def test_an_earlier_answer_is_cut_before_the_last_one(load, chat_tokenizer):
    turns = [
        {"role": role, "content": text} for role, text in zip(["user", "assistant"] * 2, "qzxj", strict=True)
    ]
    whole = load("answer", {"messages": turns}).batch([1])
    longest = whole["tokens"].lengths[0] - 20
    cut = load("answer", {"messages": turns}, max_tokens=longest, on_too_long="keep_end").batch([1])
    assert cut["tokens"].row(0).tolist() == whole["tokens"].row(0).tolist()[20:]
    assert cut["loss_mask"].row(0).tolist() == whole["loss_mask"].row(0).tolist()[20:]


@pytest.mark.parametrize(
    ("form", "record", "limits"),
    [
        ("answer", {"prompt": "q", "answer": "jkvxz"}, {"max_tokens": 4, "on_too_long": "keep_end"}),
        (
            "pair",
            {"prompt": "q", "chosen": "jjjj", "rejected": "jjjk"},
            {"max_tokens": 4, "on_too_long": "keep_start"},
        ),
        (
            "steps",
            {"prompt": "q", "completions": ["jkvxz"], "labels": [True]},
            {"max_tokens": 5, "on_too_long": "keep_start"},
        ),
    ],
)
def test_what_cannot_be_cut_is_left_out_as_too_long(load, form, record, limits):
    data = load(form, record, **limits)
    assert (len(data), data.skipped, data.too_long) == (1, 1, 1)


def test_blank_prompts_are_noted(load, chat_tokenizer):
    for record in ({"prompt": " \n"}, {"messages": [{"role": "user", "content": " "}]}):
        notes = load("prompt", record).notes
        assert any(note.startswith("1 prompts are blank, first") and "data.jsonl:2" in note for note in notes)


def test_too_long_records_still_end_a_run_unless_they_are_cut(load):
    with pytest.raises(UserError, match=r"more than data\.max_prompt_tokens"):
        load("prompt", {"prompt": "qzxjkv"}, max_prompt_tokens=4)
