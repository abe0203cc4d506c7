"""Tool calls in the texts of models.

Models write calls in the format of their chat template. Four formats cover most models. The package `renderers`
reads more of them, but it brings an HTTP client and a pre-release of another package.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ToolCall:
    """Call of a tool by the model; `problem` says what is wrong with a call that cannot be read."""

    name: str
    arguments: Mapping[str, Any]
    problem: str = ""


def find_format(template: str) -> str | None:
    """Find the format that a chat template uses; None if it is not one of the known formats."""
    marks = {
        "gpt_oss": "<|channel|>",
        "mistral": "[TOOL_CALLS]",
        "hermes": "<tool_call>",
        "llama3": "<|python_tag|>",
    }
    found = next((name for name, mark in marks.items() if mark in template), None)
    if found is None and '"parameters": ' in template and "tools" in template:
        return "llama3"
    return found


def read_calls(text: str, form: str, tools: Sequence[Mapping[str, Any]]) -> list[ToolCall]:
    """Read the tool calls of a turn. `text` has its special tokens; `tools` are the schemas.

    A call that cannot be read has a `problem`. A block of reasoning calls nothing.
    """
    spoken = text.rpartition("</think>")[2] if "</think>" in text else text.partition("<think>")[0]
    return list(_READERS[form](spoken, {tool["function"]["name"]: tool["function"] for tool in tools}))


def _read_hermes(text: str, tools: Mapping[str, Any]) -> Iterator[ToolCall]:
    for block in re.findall(r"<tool_call>(.*?)(?:</tool_call>|\Z)", text, re.DOTALL):
        if block.lstrip().startswith("<function="):
            yield _read_tags(block, tools)
        else:
            yield _read_json(block)


def _read_tags(block: str, tools: Mapping[str, Any]) -> ToolCall:
    """Read a call as Qwen3-Coder writes it: <function=NAME> <parameter=NAME> value </parameter> </function>."""
    found = re.search(r"<function=([^>\n]+)>(.*?)(?:</function>|\Z)", block, re.DOTALL)
    if found is None:
        return ToolCall("", {}, "the tag <function=NAME> is not closed")
    name = found[1].strip()
    types = tools.get(name, {}).get("parameters", {}).get("properties", {})
    arguments = {}
    for key, value in re.findall(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", found[2], re.DOTALL):
        text = types.get(key.strip(), {}).get("type") == "string"
        arguments[key.strip()] = value if text else _decode(value, value)
    return ToolCall(name, arguments)


def _read_llama3(text: str, tools: Mapping[str, Any]) -> Iterator[ToolCall]:
    marked = "<|python_tag|>" in text
    spoken = text.rpartition("<|python_tag|>")[2].strip()
    if marked or spoken.startswith("{"):
        yield from _read_sequence(spoken)


def _read_mistral(text: str, tools: Mapping[str, Any]) -> Iterator[ToolCall]:
    for block in text.split("[TOOL_CALLS]")[1:]:
        named = re.match(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\])?\s*(\{.*)", block, re.DOTALL)
        if named is None:
            yield from _read_sequence(block.strip())
        else:
            yield _with_arguments(named[1], _decode(named[2], None))


def _read_gpt_oss(text: str, tools: Mapping[str, Any]) -> Iterator[ToolCall]:
    pattern = r"to=functions\.([\w.-]+)(?:(?!<\|message\|>).)*<\|message\|>(.*?)(?:<\|call\|>|<\|start\|>|\Z)"
    for name, arguments in re.findall(pattern, text, re.DOTALL):
        yield _with_arguments(name, _decode(arguments, None))


_READERS: Mapping[str, Callable[[str, Mapping[str, Any]], Iterator[ToolCall]]] = {
    "hermes": _read_hermes,
    "llama3": _read_llama3,
    "mistral": _read_mistral,
    "gpt_oss": _read_gpt_oss,
}


def _read_sequence(text: str) -> Iterator[ToolCall]:
    """Read a list of calls, or calls one after the other."""
    decoder, place = json.JSONDecoder(), 0
    while place < len(text):
        try:
            value, place = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            yield ToolCall("", {}, f"not valid JSON: {text[place : place + 200]}")
            return
        yield from (_read_call(one) for one in (value if isinstance(value, list) else [value]))
        place += len(text[place:]) - len(text[place:].lstrip(" ;,\n\t\r"))


def _read_json(text: str) -> ToolCall:
    value = _decode(text, None)
    return ToolCall("", {}, f"not valid JSON: {text.strip()[:200]}") if value is None else _read_call(value)


def _read_call(value: Any) -> ToolCall:
    if isinstance(value, Mapping) and isinstance(value.get("function"), Mapping):
        value = value["function"]
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        return ToolCall("", {}, "a call must be an object with name and arguments")
    return _with_arguments(value["name"], value.get("arguments", value.get("parameters", {})))


def _with_arguments(name: str, arguments: Any) -> ToolCall:
    if isinstance(arguments, str):
        arguments = _decode(arguments, None)
    if not isinstance(arguments, Mapping):
        return ToolCall(name, {}, "the arguments must be a JSON object")
    return ToolCall(name, arguments)


def _decode(text: str, default: Any) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return default
