"""Records with labels, ranks, steps and numbers."""

import pytest
import torch

from realrl.config.errors import UserError

ENDS = (1,)
KTO = ("tokens", "prompt_length", "label", "mismatched")
MARGIN = ("chosen", "rejected", "chosen_prompt_length", "rejected_prompt_length", "margin")


def texts(tokenizer, rows):
    return [tokenizer.decode(row) for row in rows.rows()]


def test_answers_with_labels_and_pairs_become_items_with_a_label(load, tokenizer):
    records = [
        {"prompt": "a ", "completion": "cat", "label": True},
        {"prompt": "the ", "chosen": "dog", "rejected": "mat"},
        {"prompt": "b ", "completion": "cat", "label": 0},
    ]
    data = load(records, "label", KTO)
    batch = data.batch([3, 0, 2])
    assert batch["label"].values.tolist() == [0, 1, 0] and batch["label"].values.dtype == torch.int64
    assert texts(tokenizer, batch["tokens"]) == ["<s>b cat</s>", "<s>a cat</s>", "<s>the mat</s>"]
    assert texts(tokenizer, batch["mismatched"]) == ["<s>b mat</s>", "<s>a cat</s>", "<s>the cat</s>"]
    starts = batch["prompt_length"].values.tolist()
    prompts = [tokenizer.decode(row[:n]) for row, n in zip(batch["tokens"].rows(), starts, strict=True)]
    assert prompts == ["<s>b ", "<s>a ", "<s>the "]


def test_labels_may_be_text_as_pandas_writes_them_to_tables(load, tmp_path):
    pandas = pytest.importorskip("pandas")
    file = tmp_path / "rows.csv"
    rows = {"prompt": ["a", "b"], "completion": ["cat", "dog"], "label": [True, False]}
    pandas.DataFrame(rows).to_csv(file, index=False)
    batch = load(str(file), "label", KTO).batch([0, 1])
    assert batch["label"].values.tolist() == [1, 0]


def test_conversations_have_labels_too(load, chat_tokenizer):
    turn = {"role": "user", "content": "a"}
    record = {"prompt": [turn], "completion": [{"role": "assistant", "content": "cat"}], "label": False}
    batch = load([record], "label", KTO).batch([0])
    assert texts(chat_tokenizer, batch["tokens"]) == ["<|user|>a</s>\n<|assistant|>cat</s>"]


def test_a_mismatched_row_is_no_longer_than_a_training_sequence(load):
    records = [
        {"prompt": "q" * 6, "completion": "z", "label": True},
        {"prompt": "q", "completion": "z" * 6, "label": True},
    ]
    data = load(records, "label", KTO, max_tokens=9, max_prompt_tokens=8)
    assert max(data.batch([0, 1])["mismatched"].lengths) == 9


def test_numbers_of_pairs_are_float32(load, write):
    pair = {"prompt": "a", "chosen": "cat", "rejected": "dog"}
    source = write([{**pair, "margin": 0.25}, {**pair, "margin": 2}])
    batch = load(source, "pair", MARGIN).batch([1, 0])
    assert batch["margin"].values.tolist() == [2.0, 0.25]
    assert batch["margin"].values.dtype == torch.float32


PAIR = {"prompt": "a", "chosen": "cat", "rejected": "dog"}
STEPS = ("tokens", "step_ends", "step_labels")


@pytest.mark.parametrize(
    ("form", "keys", "record", "message"),
    [
        ("pair", MARGIN, PAIR, r"no field 'margin' \(fields: prompt, chosen, rejected\)"),
        ("pair", MARGIN, {**PAIR, "margin": "1"}, "'margin' must be a finite number, not '1'"),
        ("pair", MARGIN, {**PAIR, "margin": True}, "'margin' must be a finite number, not True"),
        (
            "pair",
            MARGIN,
            {"prompt": "a", "pos_answers": ["b"], "neg_answers": ["c"], "margin": 1},
            "'margin' is a number of one pair",
        ),
        (
            "label",
            KTO,
            {"prompt": "a", "completion": "b", "label": "good"},
            "must be true or false, or 1 or 0",
        ),
        ("label", KTO, {"prompt": "a", "completion": "b"}, "no field 'label'"),
        ("label", KTO, {"prompt": "a", "completion": " ", "label": True}, "'completion' is empty"),
        (
            "ranked",
            ("answer_0", "answer_1"),
            {"prompt": "a", "answers": ["b"]},
            "1 texts, and the recipe .* 2",
        ),
        ("steps", STEPS, {"prompt": "a", "completions": ["b"], "labels": []}, "'labels' must be a list of 1"),
        (
            "steps",
            STEPS,
            {"prompt": "a", "completions": ["b"], "labels": [2]},
            "'labels' must be true or false",
        ),
    ],
)
def test_records_that_lack_what_a_recipe_asks_for_are_named(load, form, keys, record, message):
    with pytest.raises(UserError, match=rf"data\.jsonl:1: .*{message}"):
        load([record], form, keys)


def test_ranked_answers_are_a_row_each(load, tokenizer, write):
    keys = ("answer_0", "answer_1", "answer_2")
    source = write([{"prompt": "a ", "answers": ["cat", "dog", "mat"]}])
    batch = load(source, "ranked", keys).batch([0])
    found = [texts(tokenizer, batch[key])[0] for key in keys]
    assert found == ["<s>a cat</s>", "<s>a dog</s>", "<s>a mat</s>"]


def test_steps_end_at_their_last_tokens(load, tokenizer, write):
    source = write([{"prompt": "a ", "completions": ["cat", "dog\n"], "labels": [True, False]}])
    batch = load(source, "steps", STEPS).batch([0])
    tokens = batch["tokens"].row(0)
    ends = batch["step_ends"].row(0).tolist()
    assert [tokenizer.decode(tokens[: end + 1]) for end in ends] == ["<s>a cat\n", "<s>a cat\ndog\n"]
    assert ends[-1] == len(tokens) - 1
    assert batch["step_labels"].row(0).tolist() == [1, 0]
