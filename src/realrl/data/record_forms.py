"""Forms of records, and conversion of records of each form to texts of items.

    {prompt, answer}                          fine-tuning; the answer is text or messages
    {messages}                                fine-tuning on assistant turns; or a prompt
    {prompt, chosen, rejected}                preference pair
    {prompt, pos_answers, neg_answers}        several preference pairs
    {prompt, completion, label}               answer that is good (true) or bad; a pair makes one of each
    {prompt, answers}                         answers to one prompt, the best first
    {prompt, completions, labels}             answer in steps, each right (true) or wrong
    {prompt}                                  prompt to generate from

`prompt`, `chosen` and `rejected` are text, or lists of {role, content} messages. A record in which one of them is a
list is a conversation, and the tokenizer's chat template writes it. In a conversation, a text `prompt` is the user
turn, and a text answer is the assistant turn. Chosen and rejected messages are the turns that follow `prompt`. If
they do not begin with an assistant turn, they are whole conversations. All other text is used unchanged, unless
`data.apply_chat_template` makes every record a conversation.

Other fields are for functions, such as a reward function. If no call of the graph reads them, they are ignored. In
conversations, `tools` (descriptions of functions) and `chat_template_kwargs` are arguments of the template, see
`data/tools.py`.

Records in other usual forms are rewritten first, see `data/variants.py`.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import product
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal
from zlib import crc32

from realrl.config.errors import UserError
from realrl.config.explain import nearest
from realrl.data.chat_template import ChatTemplate, Conversation, Message
from realrl.data.order import permute
from realrl.data.rejects import BadRecordError
from realrl.data.tools import drop_nulls, read_calls, read_template_options
from realrl.recipe.forms import FORMS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Fields = dict[str, Any]


@dataclass(frozen=True)
class Text:
    """Plain text: a prompt, and possibly its answer."""

    prompt: str
    answer: str | None


@dataclass(frozen=True)
class Steps:
    """Plain text: a prompt and the steps of its answer, each with its separator."""

    prompt: str
    steps: tuple[str, ...]


Item = tuple[Text | Conversation | Steps, ...]
"""Texts of one item: one text to train on or to generate from, a chosen and a rejected text, or ranked texts."""


@dataclass(frozen=True)
class Reader:
    """Converts records to items. At most `max_pairs` pairs are drawn from a record, depending on `seed`."""

    template: ChatTemplate
    """Chat template. Arguments that a record gives take precedence over its `options`."""
    apply_chat_template: bool = False
    train_on: Literal["all", "last"] = "all"
    max_pairs: int = 1
    seed: int = 1
    ranked: int = 0
    """Number of answers in each record of ranked answers."""

    def __post_init__(self) -> None:
        if self.apply_chat_template and not self.template.tokenizer.chat_template:
            name = self.template.tokenizer.name_or_path
            raise UserError(
                f"tokenizer {name} has no chat template, which data.apply_chat_template and --chat need"
            )

    def read(self, form: str, record: Fields) -> list[Item]:
        """Read a record of the form `form`. Raises BadRecordError if the record has another form."""
        if is_plain_text(record) and not self.apply_chat_template:
            return READERS[form](self, record)  # without a template, `tools` may be anything
        options = {**self.template.options, **read_template_options(record)}
        return READERS[form](replace(self, template=replace(self.template, options=options)), record)

    def answers(self, record: Fields) -> list[Item]:
        """Read a prompt and its answer, or a conversation."""
        form = FORMS["answer"]
        if form.is_other(record):
            messages = read_messages(record, "messages")
            return self._conversations(messages)
        _require(record, form.fields, form.accepted)
        # An empty prompt means that the answer is the whole text, not a reply to an empty user turn.
        if not self._is_conversation(record) or (record["prompt"] == "" and not _has_turns(record)):
            return [(Text(_string(record, "prompt"), _string(record, "answer")),)]
        asked = _prompt_turns(record)
        return self._conversations([*asked, *_turns_of(record, "answer")], after=len(asked))

    def _conversations(self, messages: list[Message], after: int = 1) -> list[Item]:
        written = self.template.write_conversation(messages, self.train_on, after=after)
        return [(conversation,) for conversation in written]

    def pairs(self, record: Fields) -> list[Item]:
        form = FORMS["pair"]
        if form.is_other(record):
            _require(record, form.other_fields, form.accepted)
            return self._expanded(record)
        sides = ("chosen", "rejected")
        if all(isinstance(record.get(field), list) for field in sides):
            _require(record, sides, form.accepted)
        else:
            _require(record, form.fields, form.accepted)
        if not self._is_conversation(record):
            prompt = _string(record, "prompt")
            return [tuple(Text(prompt, _answer(_string(record, field), field)) for field in sides)]
        chosen, rejected = (_whole_conversation(record, field) for field in sides)
        after = _find_prompt(record, chosen, rejected)
        return [(self._side(chosen, after, "chosen"), self._side(rejected, after, "rejected"))]

    def labelled(self, record: Fields) -> list[Item]:
        """Read an answer that has a label. A pair becomes two items, one for each answer."""
        form = FORMS["label"]
        if form.is_other(record):
            return [(side,) for pair in self.pairs(record) for side in pair]
        _require(record, form.fields, form.accepted)
        if not self._is_conversation(record):
            completion = _answer(_string(record, "completion"), "completion")
            return [(Text(_string(record, "prompt"), completion),)]
        turns = _whole_conversation(record, "completion")
        after = len(_prompt_turns(record)) if _continues(record, "completion") else len(turns) - 1
        return [(self._side(turns, after, "completion"),)]

    def ranking(self, record: Fields) -> list[Item]:
        """Read answers to one prompt, the best first."""
        form = FORMS["ranked"]
        _require(record, form.fields, form.accepted)
        answers = [_answer(text, "answers") for text in _strings(record, "answers")]
        if len(answers) != self.ranked:
            raise BadRecordError(
                f"field 'answers' has {len(answers)} texts, and the recipe asks for {self.ranked}"
            )
        if not self._is_conversation(record):
            prompt = _string(record, "prompt")
            return [tuple(Text(prompt, text) for text in answers)]
        turns = _prompt_turns(record)
        return [tuple(self._side([*turns, _reply(text)], len(turns), "answers") for text in answers)]

    def steps(self, record: Fields) -> list[Item]:
        """Read an answer in steps. A step without a line break at its end gets one."""
        form = FORMS["steps"]
        _require(record, form.fields, form.accepted)
        if self._is_conversation(record):
            raise BadRecordError("an answer in steps is plain text, without a chat template")
        steps = [_answer(text, "completions") for text in _strings(record, "completions")]
        labels = record["labels"]
        if not isinstance(labels, list) or len(labels) != len(steps):
            raise BadRecordError(
                f"field 'labels' must be a list of {len(steps)}, one for each of 'completions'"
            )
        ended = (step if step.endswith("\n") else f"{step}\n" for step in steps)
        return [(Steps(_string(record, "prompt"), tuple(ended)),)]

    def prompts(self, record: Fields) -> list[Item]:
        prompt = self.prompt(record)
        if isinstance(prompt, str) and not self._is_conversation(record):
            return [(Text(prompt, None),)]
        turns = [_user(prompt)] if isinstance(prompt, str) else prompt
        return [(self.template.write_prompt(turns),)]

    def prompt(self, record: Fields) -> str | list[Message]:
        """Read the prompt of a record: text, or turns up to the last user turn or a final tool result."""
        form = FORMS["prompt"]
        (field,) = form.fields_of(record)
        _require(record, (field,), form.accepted)
        if field == "prompt" and not isinstance(record[field], list):
            return _string(record, field)
        messages = read_messages(record, field)
        users = [i for i, message in enumerate(messages) if message["role"] == "user"]
        if not users:
            raise BadRecordError(f"{field} has no user turn to answer")
        # The result of a tool also needs an answer.
        return messages if messages[-1]["role"] == "tool" else messages[: users[-1] + 1]

    def _is_conversation(self, record: Fields) -> bool:
        """Check whether a record without `messages` uses the chat template."""
        return self.apply_chat_template or _has_turns(record)

    def _expanded(self, record: Fields) -> list[Item]:
        answers = ("pos_answers", "neg_answers")
        good, bad = ([_answer(text, field) for text in _strings(record, field)] for field in answers)
        pairs = list(product(good, bad))
        as_text = isinstance(record["prompt"], str)
        prompt = _string(record, "prompt") if as_text else json.dumps(record["prompt"])
        order = permute(len(pairs), seed=self.seed, stream=crc32(prompt.encode())).tolist()
        kept = [pairs[i] for i in sorted(order[: self.max_pairs])]
        if not self._is_conversation(record):
            _string(record, "prompt")
            return [tuple(Text(prompt, text) for text in pair) for pair in kept]
        turns = _prompt_turns(record)
        return [
            tuple(
                self._side([*turns, _reply(text)], len(turns), field)
                for text, field in zip(pair, answers, strict=True)
            )
            for pair in kept
        ]

    def _side(self, messages: list[Message], after: int, field: str) -> Conversation:
        """Write one side of a pair. Its answer is all turns after the first `after`, and ends as in generation."""
        if messages[-1]["role"] != "assistant" or after == 0:
            raise BadRecordError(f"field {field!r} must end with an assistant turn that answers a prompt")
        if any(not turn.get("weight", 1) for turn in messages[after:]):
            raise BadRecordError(f"a turn of {field!r} has weight 0; all turns of a side are compared")
        if not messages[-1].get("tool_calls"):
            _answer(messages[-1]["content"], field)
        return self.template.write_side(messages, after)


READERS: Mapping[str, Callable[[Reader, Fields], list[Item]]] = MappingProxyType(
    {
        "answer": Reader.answers,
        "pair": Reader.pairs,
        "label": Reader.labelled,
        "ranked": Reader.ranking,
        "steps": Reader.steps,
        "prompt": Reader.prompts,
    }
)
"""Form, one of `recipe.forms.FORMS` -> reader of its records."""


def further_fields(form: str, record: Fields) -> Fields:
    read = FORMS[form].fields_of(record)
    return {name: value for name, value in record.items() if name not in read}


def is_plain_text(record: Fields) -> bool:
    """Check that a record is not a conversation."""
    return "messages" not in record and not _has_turns(record)


def _has_turns(record: Fields) -> bool:
    fields = ("prompt", "answer", "completion", "chosen", "rejected")
    return any(isinstance(record.get(name), list) for name in fields)


def plain_text_note(tokenizer: "PreTrainedTokenizerFast", applied: bool, option: str) -> str | None:
    """Write the note on how plain-text prompts are used; None for a tokenizer without a chat template.

    `applied`: whether plain-text prompts become conversations. `option`: the option for this, in the message.
    """
    if not tokenizer.chat_template:
        return None
    if applied:
        return (
            f"prompts of plain text are written with the tokenizer's chat template, as a user turn ({option})"
        )
    return (
        "prompts are plain text and are used as they stand; the tokenizer has a chat template: "
        f"{option} applies it"
    )


def _require(record: Fields, fields: tuple[str, ...], accepted: str) -> None:
    missing = [field for field in fields if field not in record]
    if missing:
        present = ", ".join(record) or "none"
        raise BadRecordError(
            f"no field {missing[0]!r} (fields: {present}); a record must be {accepted}; data.columns renames fields"
        )


def _string(record: Fields, field: str) -> str:
    return _text(record[field], field)


def _strings(record: Fields, field: str) -> list[str]:
    value = record[field]
    if not isinstance(value, list) or not value:
        raise BadRecordError(f"field {field!r} must be a list of at least one text")
    return [_text(text, field) for text in value]


def _text(value: Any, field: str) -> str:
    if not isinstance(value, str):
        raise BadRecordError(f"field {field!r} must be text, not {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise BadRecordError(
            f"field {field!r} contains half a surrogate pair, which is no character"
        ) from None
    return value


def _answer(text: str, field: str) -> str:
    """Return an answer. Raises BadRecordError if it is empty."""
    if not text.strip():
        raise BadRecordError(f"an answer in {field!r} is empty")
    return text


_ROLES = ("assistant", "developer", "function", "system", "tool", "user")
"""Usual roles of chat templates. A template may have other roles, so only misspellings are refused."""


def read_messages(record: Fields, field: str) -> list[Message]:
    """Read messages: content in parts becomes text, and JSON text of arguments in tool calls becomes `Arguments`.

    Raises BadRecordError if a message is not valid, or has other parts than text.
    """
    value = record[field]
    if not isinstance(value, list) or not value or not all(isinstance(turn, dict) for turn in value):
        raise BadRecordError(f"field {field!r} must be a list of {{role, content}} messages")
    return [_message(turn, field) for turn in value]


def _message(turn: Fields, field: str) -> Message:
    """Read a message: its content becomes text, and null fields, as in tables, are dropped.

    A message with tool calls may lack content, which templates distinguish from empty text.
    """
    message = {name: value for name, value in turn.items() if value is not None}
    role = _text(turn.get("role"), f"{field}.role")
    meant = None if role in _ROLES else nearest(role, _ROLES)
    if meant is not None:
        raise BadRecordError(f"field '{field}.role' is {role[:40]!r}; did you mean {meant}?")
    if message.get("weight", 1) not in (0, 1):
        raise BadRecordError(f"field '{field}.weight' must be 0 or 1, not {message['weight']!r}")
    if message.get("tool_calls"):
        message["tool_calls"] = read_calls(message["tool_calls"], f"{field}.tool_calls")
    content = turn.get("content")
    if isinstance(content, list):
        content = "".join(_part(part, f"{field}.content") for part in content)
    if content is None and message.get("tool_calls"):
        return message
    return {**message, "content": _text(content, f"{field}.content")}


def _part(part: Any, field: str) -> str:
    kind = part.get("type", "text") if isinstance(part, dict) else None
    if kind != "text":
        what = type(part).__name__ if kind is None else f"of type {kind!r}"
        raise BadRecordError(
            f"a part of {field!r} is {what}; only parts of text, {{type: text, text}}, are read"
        )
    return _text(part.get("text"), f"{field}.text")


def drops_nulls(record: Fields, apply_chat_template: bool) -> bool:
    """Check for nulls in tools or tool calls of a conversation. Arrow writes nulls for keys of other rows."""
    if is_plain_text(record) and not apply_chat_template:
        return False
    turns = (turn for value in record.values() if isinstance(value, list) for turn in value)
    calls = [turn.get("tool_calls") for turn in turns if isinstance(turn, dict)]
    return any(value != drop_nulls(value) for value in (record.get("tools"), *calls))


def _turns_of(record: Fields, field: str) -> list[Message]:
    """List the turns of an answer, text or messages."""
    return (
        read_messages(record, field) if isinstance(record[field], list) else [_reply(_string(record, field))]
    )


def _whole_conversation(record: Fields, field: str) -> list[Message]:
    """List the turns of one side of a pair, from the first to the answer."""
    turns = _turns_of(record, field)
    if turns[0]["role"] != "assistant":
        return turns
    _require(record, ("prompt",), f"{field} that begins with a user turn, or {{prompt, {field}}}")
    return [*_prompt_turns(record), *turns]


def _continues(record: Fields, field: str) -> bool:
    """Check whether an answer consists only of the turns after `prompt`, and is not a whole conversation."""
    return not isinstance(record[field], list) or read_messages(record, field)[0]["role"] == "assistant"


def _find_prompt(record: Fields, chosen: list[Message], rejected: list[Message]) -> int:
    """Count the turns of a pair's shared prompt: `prompt`, or the common beginning of both sides."""
    if _continues(record, "chosen") and _continues(record, "rejected"):
        return len(_prompt_turns(record))
    shared = min(len(chosen), len(rejected)) - 1
    after = next((i for i in range(shared) if chosen[i] != rejected[i]), shared)
    if any(side[after]["role"] != "assistant" for side in (chosen, rejected)):
        raise BadRecordError(
            f"chosen and rejected have different prompts: they differ at turn {after + 1}, which is not an answer"
        )
    return after


def _prompt_turns(record: Fields) -> list[Message]:
    if isinstance(record["prompt"], list):
        return read_messages(record, "prompt")
    return [_user(_string(record, "prompt"))]


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _reply(text: str) -> Message:
    return {"role": "assistant", "content": text}
