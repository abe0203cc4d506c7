"""Tool calls are read as models of several families write them, and mistakes are answered."""

import pytest

from realrl.environments.tool_calls import ToolCall, find_format, read_calls

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer"},
                    "b": {"type": "integer"},
                    "note": {"type": "string"},
                },
            },
        },
    }
]
ADD = ToolCall("add", {"a": 1, "b": 2})


@pytest.mark.parametrize(
    ("form", "text", "calls"),
    [
        ("hermes", 'Let me see.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>', [ADD]),
        ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": 2}"}</tool_call>' * 2,
         [ADD, ADD]),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}', [ADD]),
        (
            "hermes",
            "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=note>\n2\n</parameter>\n"
            "</function>\n</tool_call>",
            [ToolCall("add", {"a": 1, "note": "2"})],
        ),
        ("hermes", 'I could <think> call <tool_call>{"name": "add"}</tool_call> </think> but I do not.', []),
        ("llama3", '{"name": "add", "parameters": {"a": 1, "b": 2}}', [ADD]),
        ("llama3", '<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": 2}}; {"name": "end"}',
         [ADD, ToolCall("end", {})]),
        ("llama3", "The sum is 3.", []),
        ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": 2}, "id": "123456789"}]', [ADD]),
        ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}[TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}', [ADD, ADD]),
        ("gpt_oss",
         '<|channel|>analysis<|message|>Adding.<|end|><|start|>assistant<|channel|>commentary to=functions.add'
         ' <|constrain|>json<|message|>{"a": 1, "b": 2}<|call|>', [ADD]),
        ("gpt_oss", "<|channel|>final<|message|>3", []),
    ],
)  # fmt: skip
def test_calls_are_read(form: str, text: str, calls: list[ToolCall]) -> None:
    assert read_calls(text, form, TOOLS) == calls


@pytest.mark.parametrize(
    ("form", "text", "problem"),
    [
        ("hermes", "<tool_call>{name: add}</tool_call>", "not valid JSON"),
        ("hermes", "<tool_call>3</tool_call>", "an object with name and arguments"),
        ("hermes", '<tool_call>{"name": "add", "arguments": [1, 2]}</tool_call>', "must be a JSON object"),
        ("llama3", '{"name": "add", "parameters": {"a": 1', "not valid JSON"),
        ("mistral", "[TOOL_CALLS] add 1 and 2", "not valid JSON"),
        ("mistral", '[TOOL_CALLS]add[ARGS]{"a": ', "must be a JSON object"),
        ("gpt_oss", "to=functions.add<|message|>1 + 2<|call|>", "must be a JSON object"),
        ("hermes", "<tool_call>" + "[" * 100_000, "not valid JSON"),
    ],
)
def test_a_call_that_cannot_be_read_has_a_problem(form: str, text: str, problem: str) -> None:
    (call,) = read_calls(text, form, TOOLS)
    assert problem in call.problem


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("... <tool_call>\n{{ call | tojson }}\n</tool_call>", "hermes"),
        ("{{ '[TOOL_CALLS]' }}", "mistral"),
        ("{{ '<|python_tag|>' }}", "llama3"),
        ("<|channel|>commentary", "gpt_oss"),
        ("{{ messages }}", None),
    ],
)
def test_the_format_is_found_in_the_chat_template(template: str, form: str | None) -> None:
    assert find_format(template) == form
