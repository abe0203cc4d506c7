"""Other usual ways to write records, rewritten into the fields that `data/record_forms.py` reads."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from realrl.data.record_forms import Fields
from realrl.data.rejects import BadRecordError
from realrl.recipe.forms import FORMS

_ROLES = {"human": "user", "gpt": "assistant", "function_call": "assistant", "observation": "tool"}
"""Roles of ShareGPT -> their names in chat templates."""


def rename_fields(record: Fields, columns: Mapping[str, str]) -> Fields:
    """Rename the fields of a record. `columns`: name in the record -> new name.

    A dot in a name selects a nested field, which is copied. Raises BadRecordError if two fields would have the same
    name.
    """
    renamed: Fields = {}
    for theirs, ours in columns.items():
        value = find_field(record, theirs)
        if value is None:
            continue
        if ours in renamed:
            raise BadRecordError(f"data.columns calls two fields of the record {ours!r}")
        renamed[ours] = value
    kept = {name: value for name, value in record.items() if name not in columns}
    both = next((name for name in renamed if name in kept), None)
    if both is not None:
        theirs = next(theirs for theirs, ours in columns.items() if ours == both)
        raise BadRecordError(
            f"data.columns calls {theirs!r} {both!r}, and the record has a field {both!r}, too; give that one"
            f" another name, as in {{{both}: other_{both}}}"
        )
    return {**kept, **renamed}


def find_field(record: Fields, path: str) -> Any:
    """Find a field of a record by its name, or by the path to a nested field; None if there is none."""
    if path in record:
        return record[path]
    value: Any = record
    for part in path.split("."):
        if not isinstance(value, dict):
            return None
        value = value.get(part)
    return value


def rewrite(form: str, record: Fields) -> Fields:
    """Rewrite a record that has the fields of a variant of the form. Any other record is returned unchanged."""
    spec = FORMS[form]
    if any(all(field in record for field in fields) for fields in (spec.fields, spec.other_fields)):
        return record
    for fields in spec.variants:
        if all(field in record for field in fields):
            return REWRITES[form, fields](record)
    return record


def _without(record: Fields, *names: str) -> Fields:
    return {name: value for name, value in record.items() if name not in names}


def _rewrite_completion(record: Fields) -> Fields:
    return {**_without(record, "completion"), "answer": record["completion"]}


def _rewrite_text(record: Fields) -> Fields:
    if "prompt" in record:
        raise BadRecordError("a record with 'prompt' and 'text' has no answer; name it with data.columns")
    return {**_without(record, "text"), "prompt": "", "answer": record["text"]}


def _rewrite_conversations(record: Fields) -> Fields:
    """Rewrite ShareGPT turns, {from, value}; turns {role, content} stay unchanged."""
    turns = record["conversations"]
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise BadRecordError("field 'conversations' must be a list of {from, value} or {role, content} turns")
    messages = [
        {
            **_without(turn, "from", "value"),
            "role": _ROLES.get(turn["from"], turn["from"]),
            "content": turn["value"],
        }
        if {"from", "value"} <= turn.keys()
        else turn
        for turn in turns
    ]
    system = record.get("system")
    if isinstance(system, str) and system and messages and messages[0].get("role") != "system":
        messages.insert(0, {"role": "system", "content": system})
    return {**_without(record, "conversations"), "messages": messages}


def _rewrite_instruction(record: Fields) -> Fields:
    """Rewrite a record of Alpaca for training: the input, if any, follows the instruction.

    A record with a system message or a history, as in LLaMA-Factory, becomes a conversation.
    """
    before = _list_earlier_turns(record)
    if before:
        turns = [("user", _join_instruction(record)), ("assistant", record["output"])]
        messages = [*before, *({"role": role, "content": text} for role, text in turns)]
        rest = _without(record, "instruction", "input", "output", "system", "history")
        return {**rest, "messages": messages}
    return {
        **_without(record, "instruction", "input", "output"),
        "prompt": _join_instruction(record),
        "answer": record["output"],
    }


def _prompt_with_instruction(record: Fields) -> Fields:
    before = _list_earlier_turns(record)
    prompt: Any = _join_instruction(record)
    return {**record, "prompt": [*before, {"role": "user", "content": prompt}] if before else prompt}


def _list_earlier_turns(record: Fields) -> list[Fields]:
    """List the turns before the instruction: `system`, and the pairs of user and assistant in `history`."""
    system, history = record.get("system"), record.get("history") or []
    if not isinstance(history, list) or not all(isinstance(p, list) and len(p) == 2 for p in history):
        raise BadRecordError("field 'history' must be a list of [instruction, output] pairs")
    turns = [{"role": "system", "content": system}] if system else []
    for pair in history:
        turns += [
            {"role": role, "content": text} for role, text in zip(("user", "assistant"), pair, strict=True)
        ]
    return turns


def _join_instruction(record: Fields) -> str:
    parts = (record["instruction"], record.get("input") or "")
    for name, part in zip(("instruction", "input"), parts, strict=True):
        if not isinstance(part, str):
            raise BadRecordError(f"field {name!r} must be text, not {type(part).__name__}")
    return "\n\n".join(part for part in parts if part)


def _split_pair(record: Fields) -> Fields:
    """Split two texts into their common prompt and the answers; conversations stay unchanged."""
    chosen, rejected = record["chosen"], record["rejected"]
    if not isinstance(chosen, str) or not isinstance(rejected, str):
        return record
    end = find_common_prompt(chosen, rejected)
    return {**record, "prompt": chosen[:end], "chosen": chosen[end:], "rejected": rejected[end:]}


def _prompt_of_pair(record: Fields) -> Fields:
    chosen, rejected = record["chosen"], record["rejected"]
    if isinstance(chosen, str) and isinstance(rejected, str):
        return {**record, "prompt": chosen[: find_common_prompt(chosen, rejected)]}
    return {**record, "prompt": chosen}  # the prompt of a conversation ends with the last user turn


def find_common_prompt(chosen: str, rejected: str) -> int:
    """Find the end of the common prompt of two texts, which is before the first different word.

    A space before this word belongs to the answers, as in TRL's `extract_prompt`. TRL may also cut within a word,
    but the parts of a word have other tokens than the whole word.
    """
    same = next(
        (i for i, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b),
        min(len(chosen), len(rejected)),
    )
    while same and not chosen[same - 1].isspace():
        same -= 1
    return same - 1 if same and chosen[same - 1] == " " else same


REWRITES: Mapping[tuple[str, tuple[str, ...]], Callable[[Fields], Fields]] = MappingProxyType(
    {
        ("answer", ("prompt", "completion")): _rewrite_completion,
        ("answer", ("text",)): _rewrite_text,
        ("answer", ("conversations",)): _rewrite_conversations,
        ("answer", ("instruction", "output")): _rewrite_instruction,
        ("pair", ("chosen", "rejected")): _split_pair,
        ("label", ("chosen", "rejected")): _split_pair,
        ("prompt", ("conversations",)): _rewrite_conversations,
        ("prompt", ("instruction",)): _prompt_with_instruction,
        ("prompt", ("chosen", "rejected")): _prompt_of_pair,
    }
)
"""(form, variant), as in `recipe.forms.FORMS` -> function that rewrites its records."""
