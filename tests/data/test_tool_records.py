"""Tools and calls of tools mean the same in every form that data sets have them in."""

import json
from typing import Any

import datasets
import pytest

from realrl.config.errors import UserError
from realrl.data.dataset import Dataset

TEMPLATE = (
    "{% if tools is not none %}[{% for tool in tools %}{{ tool | tojson }}{% endfor %}]{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}{{ m.content or '' }}</s>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def schema(name: str, **properties: str) -> dict[str, Any]:
    kinds = {key: {"type": kind} for key, kind in properties.items()}
    return {"type": "function", "function": {"name": name, "parameters": {"properties": kinds}}}


def row(name: str, **arguments: Any) -> dict[str, Any]:
    """Record that calls a tool."""
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "b", "tool_calls": None},
        {"role": "assistant", "content": "c", "tool_calls": None},
    ]
    return {"messages": messages, "tools": [schema(name, **dict.fromkeys(arguments, "string"))]}


ROWS = [row("weather", city="Paris"), row("add", a="1", b="2")]


@pytest.fixture
def load(tokenizer, settings):
    tokenizer.chat_template = TEMPLATE

    def load(source: str, **fields: Any) -> Dataset:
        return Dataset.load(source, "answer", ("tokens", "loss_mask"), tokenizer, settings(**fields), 1, (1,))

    return load


@pytest.fixture
def texts(load, tokenizer):
    def texts(source: str, **fields: Any) -> list[str]:
        data = load(source, **fields)
        return [tokenizer.decode(ids) for ids in data.batch(range(len(data)))["tokens"].rows()]

    return texts


def expected(tokenizer: Any, record: dict[str, Any]) -> str:
    return tokenizer.apply_chat_template(record["messages"], tools=record.get("tools"), tokenize=False)


@pytest.mark.parametrize("way", ["parquet", "saved", "json type", "json type of lists"])
def test_tables_have_the_texts_of_the_records_they_were_made_of(texts, load, tokenizer, tmp_path, way):
    kinds = {
        "json type": dict.fromkeys(("messages", "tools"), datasets.Json()),
        "json type of lists": dict.fromkeys(("messages", "tools"), datasets.List(datasets.Json())),
    }
    features = datasets.Features(kinds[way]) if way in kinds else None
    made, path = datasets.Dataset.from_list(ROWS, features=features), str(tmp_path / "rows.parquet")
    if way == "saved":
        path = str(tmp_path / "rows")
        made.save_to_disk(path)
    else:
        made.to_parquet(path)
    assert texts(path) == [expected(tokenizer, record) for record in ROWS]
    nulls = [note for note in load(path).notes if "nulls in tools" in note]
    assert len(nulls) == (way in ("parquet", "saved"))


SCHEMA = schema("add", a="string")


@pytest.mark.parametrize(
    "tools",
    [[json.dumps(SCHEMA)], SCHEMA, json.dumps(SCHEMA), json.dumps([SCHEMA]), [SCHEMA]],
    ids=["texts", "object", "text of an object", "text of a list", "list"],
)
def test_schemas_of_tools_are_read_in_every_form(texts, tokenizer, write, tools):
    record = {**ROWS[0], "tools": tools}
    assert texts(write([record])) == [expected(tokenizer, {**record, "tools": [SCHEMA]})]


@pytest.mark.parametrize("printed", ["'call ' + arguments", "'call ' ~ arguments", "arguments"])
def test_arguments_that_are_text_suit_templates_that_want_text(texts, tokenizer, write, printed):
    record = json.loads(json.dumps(ROWS[0]))
    record["messages"][1]["tool_calls"][0]["function"]["arguments"] = '{"city":"Paris"}'
    assert texts(write([record])) == [expected(tokenizer, ROWS[0])]
    printed = printed.replace("arguments", "call.function.arguments")
    tokenizer.chat_template = TEMPLATE.replace("call.function | tojson", printed)
    assert texts(write([record])) == [expected(tokenizer, record)]


@pytest.mark.parametrize(
    "printed", ["call.function | tojson", "call.function.arguments.items() | list | tojson"]
)
def test_a_message_may_quote_arguments_in_the_form_of_python(texts, tokenizer, write, printed):
    tokenizer.chat_template = TEMPLATE.replace("call.function | tojson", printed)
    record = json.loads(json.dumps(ROWS[0]))
    record["messages"][2]["content"] = "called with {'city': 'Paris'}"
    wanted = expected(tokenizer, record)
    record["messages"][1]["tool_calls"][0]["function"]["arguments"] = '{"city":"Paris"}'
    assert texts(write([record])) == [wanted]


@pytest.mark.parametrize("tools", ["search", ["search"]])
def test_tools_of_the_recipe_that_are_no_schemas_are_refused(load, write, tools):
    with pytest.raises(
        UserError, match=r"data\.chat_template_kwargs: field 'tools' must be a list of schemas"
    ):
        load(write([ROWS[0]]), chat_template_kwargs={"tools": tools})


def test_texts_and_objects_may_be_mixed(texts, tokenizer, write):
    record = {**ROWS[0], "tools": [SCHEMA, json.dumps(SCHEMA)]}
    assert texts(write([record])) == [expected(tokenizer, {**record, "tools": [SCHEMA, SCHEMA]})]


@pytest.mark.parametrize("tools", [["add"], "add", [SCHEMA, "add"], [3]])
def test_tools_that_are_no_schemas_are_refused(load, write, tools):
    with pytest.raises(
        UserError, match=r"data\.jsonl:1: field 'tools' must be a list of schemas.*data\.columns"
    ):
        load(write([{**ROWS[0], "tools": tools}]))


def test_tools_beside_plain_text_are_for_functions(load, write):
    assert len(load(write([{"prompt": "a", "answer": "b", "tools": ["add"]}]))) == 1


@pytest.mark.parametrize("more", [{"tools": []}, {"chat_template_kwargs": {"tools": []}}, {"tools": "[]"}])
def test_no_tools_are_as_none(texts, tokenizer, write, more):
    record = {"messages": ROWS[0]["messages"]}
    assert texts(write([{**record, **more}])) == [expected(tokenizer, record)]


def test_arguments_that_are_json_text_are_decoded(texts, tokenizer, write):
    record = json.loads(json.dumps(ROWS[1]))
    function = record["messages"][1]["tool_calls"][0]["function"]
    function["arguments"] = json.dumps(function["arguments"])
    assert texts(write([record])) == [expected(tokenizer, ROWS[1])]
    function["arguments"] = "no JSON {"
    assert "no JSON {" in texts(write([record]))[0]
