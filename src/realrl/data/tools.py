"""Tool schemas and tool calls in the forms of data sets, and other arguments of a chat template."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from realrl.data.rejects import BadRecordError


def read_template_options(record: Mapping[str, Any]) -> dict[str, Any]:
    """List a record's arguments for the chat template: `chat_template_kwargs` and `tools`.

    Nulls and an empty list of tools are dropped.
    """
    options = record.get("chat_template_kwargs", {})
    if not isinstance(options, Mapping):
        raise BadRecordError("field 'chat_template_kwargs' must be an object")
    kept = {name: value for name, value in options.items() if value is not None}
    tools = read_tools(record.get("tools")) or read_tools(kept.pop("tools", None))
    return {**kept, "tools": tools} if tools else kept


def read_tools(value: Any) -> list[dict[str, Any]]:
    """Read tool schemas: a list of schemas, a single schema, or JSON text of a list. A schema may be JSON text."""
    if isinstance(value, str) and value.lstrip().startswith(("[", "{")):
        value = _decode(value, "tools")
    if not value:
        return []
    schemas = [
        _decode(schema, "tools") if isinstance(schema, str) and schema.lstrip().startswith("{") else schema
        for schema in (value if isinstance(value, list) else [value])
    ]
    wrong = [schema for schema in schemas if not isinstance(schema, dict)]
    if wrong:
        raise BadRecordError(
            f"field 'tools' must be a list of schemas, objects or JSON text, and has {str(wrong[0])[:40]!r}; if it"
            " is for functions, give it another name, as in data.columns={tools: tool_names}"
        )
    return [drop_nulls(schema) for schema in schemas]


class Arguments(dict[str, Any]):
    """Arguments of a tool call that are JSON text in the record. Most templates need the object, some the text."""

    def __init__(self, values: Mapping[str, Any], text: str) -> None:
        super().__init__(values)
        self.text = text


def find_arguments(value: Any) -> Iterator[Arguments]:
    """Find all `Arguments` in messages, at any depth."""
    if isinstance(value, Arguments):
        yield value
    elif isinstance(value, Mapping | list):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from find_arguments(inner)


def write_arguments(value: Any) -> Any:
    """Replace `Arguments`, at any depth, by their JSON text."""
    if isinstance(value, Arguments):
        return value.text
    if isinstance(value, Mapping):
        return {name: write_arguments(inner) for name, inner in value.items()}
    return [write_arguments(inner) for inner in value] if isinstance(value, list) else value


def read_calls(value: Any, field: str) -> list[dict[str, Any]]:
    """Read the tool calls of a message; JSON text of an object in `arguments` becomes `Arguments`."""
    calls = _decode(value, field) if isinstance(value, str) else value
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise BadRecordError(f"field {field!r} must be a list of calls, {{function: {{name, arguments}}}}")
    return [_read_call(drop_nulls(call)) for call in calls]


def _read_call(call: dict[str, Any]) -> dict[str, Any]:
    if isinstance(call.get("function"), dict):
        return {**call, "function": _read_call(call["function"])}
    if isinstance(call.get("arguments"), str):
        try:
            arguments = json.loads(call["arguments"])
        except (ValueError, RecursionError):
            return call  # a model may have written invalid JSON
        known = isinstance(arguments, dict)
        return {**call, "arguments": Arguments(arguments, call["arguments"])} if known else call
    return call


def drop_nulls(value: Any) -> Any:
    """Drop null values from objects, at any depth. Arrow adds such values for keys that only other rows have."""
    if isinstance(value, Mapping):
        return {name: drop_nulls(inner) for name, inner in value.items() if inner is not None}
    return [drop_nulls(inner) for inner in value] if isinstance(value, list) else value


def _decode(text: str, field: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise BadRecordError(f"field {field!r} is not valid JSON") from None
