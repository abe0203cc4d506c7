"""Records as TRL, verl and others write them become the same tokens as those in the fields that are read."""

import json
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from realrl.config.errors import UserError
from realrl.data.dataset import Dataset
from realrl.data.rejects import BadRecordError
from realrl.data.variants import REWRITES, find_common_prompt, rename_fields
from realrl.recipe.forms import FORMS

KEYS = {"answer": ("tokens", "loss_mask"), "pair": ("chosen", "rejected"), "prompt": ("prompts",)}
USER = {"role": "user", "content": "the cat"}
REPLY = {"role": "assistant", "content": "sat"}
OTHER = {"role": "assistant", "content": "ate"}
ASKED = "<|user|>the cat</s>\n<|assistant|>"


@pytest.fixture
def load(chat_tokenizer, write, settings):
    def load(source: Any, form: str, **fields: Any) -> Dataset:
        given = write(source) if isinstance(source, list) else source
        return Dataset.load(
            given, form, KEYS[form], chat_tokenizer, settings(**fields), 1, (1,), lambda name: True
        )

    return load


@pytest.fixture
def texts(load, chat_tokenizer):
    """Decoded rows of the only item; of `loss_mask`, the text of the tokens to learn."""

    def texts(record: Any, form: str, **fields: Any) -> dict[str, str]:
        batch = load([record], form, **fields).batch([0])
        return {
            key: chat_tokenizer.decode(
                batch["tokens"].row(0)[batch[key].row(0).bool()] if key == "loss_mask" else batch[key].row(0)
            )
            for key in KEYS[form]
        }

    return texts


PLAIN = {"tokens": "<s>the cat sat</s>", "loss_mask": " sat</s>"}
CHAT = {"tokens": ASKED + "sat</s>\n", "loss_mask": "sat</s>"}
PLAIN_PAIR = {"chosen": "<s>the cat sat</s>", "rejected": "<s>the cat ate</s>"}
CHAT_PAIR = {"chosen": ASKED + "sat</s>", "rejected": ASKED + "ate</s>"}
PARTS = [{"type": "text", "text": "the "}, {"type": "text", "text": "cat"}]


@pytest.mark.parametrize(
    ("form", "record", "expected"),
    [
        ("answer", {"prompt": "the cat", "completion": " sat"}, PLAIN),
        ("answer", {"prompt": [USER], "completion": [REPLY]}, CHAT),
        ("answer", {"prompt": "the cat", "completion": [REPLY]}, CHAT),
        ("answer", {"prompt": [USER], "completion": "sat"}, CHAT),
        ("answer", {"prompt": [USER], "answer": [REPLY]}, CHAT),
        ("answer", {"text": "the cat sat"}, {**PLAIN, "loss_mask": "the cat sat</s>"}),
        ("answer", {"messages": [{**USER, "content": PARTS}, REPLY]}, CHAT),
        (
            "answer",
            {"conversations": [{"from": "human", "value": "the cat"}, {"from": "gpt", "value": "sat"}]},
            CHAT,
        ),
        ("answer", {"conversations": [USER, REPLY]}, CHAT),
        (
            "answer",
            {"instruction": "the", "input": "cat", "output": " sat"},
            {"tokens": "<s>the\n\ncat sat</s>", "loss_mask": " sat</s>"},
        ),
        ("answer", {"instruction": "the cat", "input": "", "output": " sat"}, PLAIN),
        (
            "answer",
            {"instruction": "the", "input": "cat", "output": "sat", "system": "s", "history": [["x", "y"]]},
            {
                "tokens": "<|system|>s</s>\n<|user|>x</s>\n<|assistant|>y</s>\n<|user|>the\n\ncat</s>\n"
                "<|assistant|>sat</s>\n",
                "loss_mask": "y</s>sat</s>",
            },
        ),
        ("answer", {"instruction": "the cat", "output": " sat", "system": "", "history": []}, PLAIN),
        (
            "prompt",
            {"instruction": "the cat", "history": [["x", "y"]]},
            {"prompts": "<|user|>x</s>\n<|assistant|>y</s>\n" + ASKED},
        ),
        ("pair", {"chosen": "the cat sat", "rejected": "the cat ate"}, PLAIN_PAIR),
        ("pair", {"chosen": [USER, REPLY], "rejected": [USER, OTHER]}, CHAT_PAIR),
        ("pair", {"prompt": "the cat", "chosen": [USER, REPLY], "rejected": [USER, OTHER]}, CHAT_PAIR),
        ("pair", {"prompt": [USER], "chosen": [REPLY], "rejected": [OTHER]}, CHAT_PAIR),
        ("prompt", {"instruction": "the cat"}, {"prompts": "<s>the cat"}),
        ("prompt", {"conversations": [{"from": "human", "value": "the cat"}]}, {"prompts": ASKED}),
        ("prompt", {"chosen": "the cat sat", "rejected": "the cat ate"}, {"prompts": "<s>the cat"}),
        ("prompt", {"chosen": [USER, REPLY], "rejected": [USER, OTHER]}, {"prompts": ASKED}),
    ],
)
def test_records_in_usual_ways_become_the_tokens_of_the_fields_that_are_read(texts, form, record, expected):
    assert texts(record, form) == expected


def test_a_text_takes_no_template(texts):
    assert texts({"text": "the cat"}, "answer", apply_chat_template=True)["tokens"] == "<s>the cat</s>"


def test_an_answer_of_several_turns_teaches_those_of_the_assistant(texts):
    completion = [REPLY, {"role": "user", "content": "dog"}, OTHER]
    record = {"prompt": [USER, OTHER, USER], "completion": completion}
    assert texts(record, "answer")["loss_mask"] == "sat</s>ate</s>"
    assert texts(record, "answer", train_on="last")["loss_mask"] == "ate</s>"


TOOL_TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool.name }}]{% endfor %}{% for m in messages %}<|{{ m.role }}|>"
    "{% for call in m.tool_calls or [] %}({{ call.function.name }}){% endfor %}"
    "{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "look"}}]}
CALLED = [USER, CALL, {"role": "tool", "content": "mat", "tool_calls": None}, REPLY]


@pytest.mark.parametrize("tools", [[{"name": "look"}], json.dumps([{"name": "look"}])])
def test_calls_of_tools_have_null_content_and_the_template_sees_the_tools(texts, chat_tokenizer, tools):
    chat_tokenizer.chat_template = TOOL_TEMPLATE
    found = texts({"messages": CALLED, "tools": tools}, "answer")
    assert (
        found["tokens"]
        == "[look]<|user|>the cat</s><|assistant|>(look)</s><|tool|>mat</s><|assistant|>sat</s>"
    )
    assert found["loss_mask"] == "(look)</s>sat</s>"
    prompts = texts({"prompt": CALLED[:3], "tools": tools}, "prompt")["prompts"]
    assert prompts == found["tokens"].removesuffix("sat</s>")


def test_a_null_content_is_no_text_whatever_the_template(texts):
    assert "None" not in texts({"messages": CALLED}, "answer")["tokens"]


def test_a_record_gives_arguments_to_the_template(texts, chat_tokenizer):
    chat_tokenizer.chat_template = "{{ '[think]' if think else '' }}" + chat_tokenizer.chat_template
    record = {"prompt": [USER], "chat_template_kwargs": {"think": True}}
    assert texts(record, "prompt")["prompts"] == "[think]" + ASKED
    asked = {"prompt": [USER]}
    assert texts(asked, "prompt", chat_template_kwargs={"think": True})["prompts"] == "[think]" + ASKED
    record["chat_template_kwargs"] = {"think": False}
    assert texts(record, "prompt", chat_template_kwargs={"think": True})["prompts"] == ASKED


def test_the_columns_of_verl_reach_functions_with_their_nested_values(load, chat_tokenizer, tmp_path):
    record = {
        "data_source": "gsm8k",
        "prompt": [USER],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "4"},
        "extra_info": {"index": 3, "split": None},
    }
    file = tmp_path / "train.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([record]), file)
    data = load(str(file), "prompt", columns={"reward_model.ground_truth": "answer"})
    assert chat_tokenizer.decode(data.batch([0])["prompts"].row(0)) == ASKED
    further = {name: values[0] for name, values in data.further.items()}
    assert further == {**{k: v for k, v in record.items() if k != "prompt"}, "answer": "4"}


def test_columns_are_renamed_before_anything_reads_them(texts):
    columns = {"question": "prompt", "solution": "completion"}
    assert texts({"question": "the cat", "solution": " sat"}, "answer", columns=columns) == PLAIN


@pytest.mark.parametrize(
    ("record", "columns", "renamed"),
    [
        ({"a": 1, "b": 2}, {"a": "b", "b": "a"}, {"b": 1, "a": 2}),
        ({"a": 1}, {"b": "c"}, {"a": 1}),
        ({"a.b": 1, "a": {"b": 2}}, {"a.b": "c"}, {"a": {"b": 2}, "c": 1}),
        ({"a": {"b": {"c": 3}}}, {"a.b.c": "d", "a.x": "e"}, {"a": {"b": {"c": 3}}, "d": 3}),
    ],
)
def test_fields_are_renamed_at_once(record, columns, renamed):
    assert rename_fields(record, columns) == renamed


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"a": 1, "c": 2}, "'a' 'c', and the record has a field 'c', too"),
        ({"a": 1, "b": 2}, "two fields of the record 'c'"),
    ],
)
def test_two_fields_of_one_name_are_named(record, message):
    with pytest.raises(BadRecordError, match=message):
        rename_fields(record, {"a": "c", "b": "c"})


def test_a_column_that_no_record_has_is_noted(load):
    data = load([{"prompt": "a"}], "prompt", columns={"promt": "prompt"})
    assert any("has a field 'promt'" in note for note in data.notes)


@pytest.mark.parametrize(
    ("chosen", "rejected", "prompt"),
    [
        ("the cat sat", "the cat ate", "the cat"),
        ("the cat sat", "the cat sang", "the cat"),
        ("Q: a\n\nA: Yes", "Q: a\n\nA: Yes, or no", "Q: a\n\nA:"),
        ("Q\nyes", "Q\nno", "Q\n"),
        ("sat", "ate", ""),
    ],
)
def test_an_implicit_prompt_ends_before_the_first_word_that_differs(chosen, rejected, prompt):
    assert chosen[: find_common_prompt(chosen, rejected)] == prompt


@pytest.mark.parametrize(
    ("form", "record", "message"),
    [
        ("answer", {"prompt": "a", "text": "b"}, "has no answer; name it with data.columns"),
        ("answer", {"question": "a"}, r"\(fields: question\).*{prompt, completion}.*data.columns renames"),
        ("answer", {"conversations": "a"}, "must be a list of {from, value}"),
        ("answer", {"instruction": 3, "output": "b"}, "'instruction' must be text, not int"),
        ("answer", {"messages": [USER, {"role": "assistant"}]}, "'messages.content' must be text"),
        (
            "answer",
            {"messages": [{**USER, "content": [{"type": "image"}]}, REPLY]},
            "is of type 'image'; only",
        ),
        ("answer", {"messages": [USER, REPLY], "tools": "[3"}, "'tools' is not valid JSON"),
        ("answer", {"messages": [USER, REPLY], "chat_template_kwargs": 3}, "must be an object"),
        ("answer", {"instruction": "a", "output": "b", "history": ["c"]}, "'history' must be a list of"),
        ("pair", {"chosen": "a b", "rejected": "a b"}, "the same"),
        (
            "pair",
            {
                "chosen": [USER, REPLY, USER, REPLY],
                "rejected": [USER, REPLY, {**USER, "content": "b"}, OTHER],
            },
            "different prompts: they differ at turn 3, which is not an answer",
        ),
        ("pair", {"chosen": [REPLY], "rejected": [OTHER]}, "no field 'prompt'"),
    ],
)
def test_a_record_that_no_way_fits_is_named_with_what_is_accepted(texts, form, record, message):
    with pytest.raises(UserError, match=rf"data\.jsonl:1: .*{message}"):
        texts(record, form)


def test_every_variant_has_a_rewrite():
    listed = {(form, fields) for form, spec in FORMS.items() for fields in spec.variants}
    assert set(REWRITES) == listed
