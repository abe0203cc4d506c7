"""The forms of records, and what each becomes: texts that are tokenised into the rows of one item.

    {prompt, answer}                          fine-tuning
    {messages}                                fine-tuning on the last assistant turn; or a prompt
    {prompt, chosen, rejected}                preference pair
    {prompt, pos_answers, neg_answers}        several preference pairs
    {prompt}                                  prompt to generate from

As `prompt`, `chosen` and `rejected`, a list of {role, content} messages may take the place of text, and is
written with the tokenizer's chat template. Chosen and rejected messages are either the turns that follow
`prompt` or, when they do not begin with an assistant turn, whole conversations. Other fields are ignored.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any
from zlib import crc32

import jinja2

from realrl.config.errors import UserError
from realrl.data.shuffle import permutation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Fields = dict[str, Any]


class BadRecordError(ValueError):
    """A record that does not have the form it should have; the text says what is accepted."""


@dataclass(frozen=True)
class Text:
    """One row to be: a prompt and perhaps the answer to it.

    `templated`: the chat template wrote the special tokens, so no beginning of sequence is added.
    """

    prompt: str
    answer: str | None
    templated: bool = False


Item = tuple[Text, ...]
"""The rows of one item: one to train on or to generate from, or the chosen one and the rejected one."""


@dataclass(frozen=True)
class Reader:
    """Turns records into items. At most `max_pairs` pairs are drawn from a record, depending on `seed`."""

    tokenizer: "PreTrainedTokenizerFast"
    max_pairs: int
    seed: int

    def answers(self, record: Fields) -> list[Item]:
        """A prompt and an answer to learn."""
        if "messages" in record:
            return [(self._exchange(_messages(record, "messages")),)]
        _require(record, ("prompt", "answer"), "{prompt, answer} or {messages}")
        if isinstance(record["prompt"], list):
            reply = {"role": "assistant", "content": _string(record, "answer")}
            return [(self._exchange([*_messages(record, "prompt"), reply]),)]
        return [(Text(_string(record, "prompt"), _string(record, "answer")),)]

    def pairs(self, record: Fields) -> list[Item]:
        """Preferred and other answers to one prompt."""
        forms = "{prompt, chosen, rejected} or {prompt, pos_answers, neg_answers}"
        if "pos_answers" in record or "neg_answers" in record:
            _require(record, ("prompt", "pos_answers", "neg_answers"), forms)
            return self._expanded(record)
        if isinstance(record.get("chosen"), list) and isinstance(record.get("rejected"), list):
            return [(self._conversation(record, "chosen"), self._conversation(record, "rejected"))]
        _require(record, ("prompt", "chosen", "rejected"), forms)
        prompt = _string(record, "prompt")
        return [(Text(prompt, _string(record, "chosen")), Text(prompt, _string(record, "rejected")))]

    def prompts(self, record: Fields) -> list[Item]:
        """A prompt to generate from."""
        field = "messages" if "messages" in record else "prompt"
        _require(record, (field,), "{prompt} or {messages}")
        if isinstance(record[field], str):
            return [(Text(_string(record, field), None),)]
        messages = _messages(record, field)
        users = [i for i, message in enumerate(messages) if message["role"] == "user"]
        if not users:
            raise BadRecordError(f"{field} has no user turn to answer")
        return [(Text(self._render(messages[: users[-1] + 1], prompt=True), None, templated=True),)]

    def _expanded(self, record: Fields) -> list[Item]:
        prompt = _string(record, "prompt")
        good, bad = (_strings(record, field) for field in ("pos_answers", "neg_answers"))
        pairs = list(product(good, bad))
        order = permutation(len(pairs), seed=self.seed, stream=crc32(prompt.encode())).tolist()
        kept = [pairs[i] for i in sorted(order[: self.max_pairs])]
        return [(Text(prompt, chosen), Text(prompt, rejected)) for chosen, rejected in kept]

    def _conversation(self, record: Fields, field: str) -> Text:
        messages = _messages(record, field)
        if messages[0]["role"] != "assistant":
            return self._exchange(messages)
        _require(record, ("prompt",), f"{field} that begins with a user turn, or {{prompt, {field}}}")
        before = record["prompt"]
        if isinstance(before, str):
            before = [{"role": "user", "content": _string(record, "prompt")}]
        else:
            before = _messages(record, "prompt")
        return self._exchange([*before, *messages])

    def _exchange(self, messages: list[Fields]) -> Text:
        """The last turn of a conversation as the answer to the turns before it."""
        if messages[-1]["role"] != "assistant" or len(messages) == 1:
            raise BadRecordError(
                "a conversation to learn from must have several turns, and end with an assistant turn"
            )
        prompt, whole = self._render(messages[:-1], prompt=True), self._render(messages, prompt=False)
        if not whole.startswith(prompt):
            raise BadRecordError(
                "the chat template writes the turns before the answer differently once it follows, so the "
                "answer cannot be told apart; use {prompt, answer} or another template"
            )
        return Text(prompt, whole[len(prompt) :], templated=True)

    def _render(self, messages: list[Fields], *, prompt: bool) -> str:
        if not self.tokenizer.chat_template:
            name = self.tokenizer.name_or_path
            raise UserError(f"tokenizer {name} has no chat template, which records with messages need")
        try:
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
        except jinja2.TemplateError as error:
            raise BadRecordError(f"the chat template refuses the messages: {error}") from None
        assert isinstance(text, str)
        return text


Form = Callable[[Reader, Fields], list[Item]]


def form_of(keys: tuple[str, ...]) -> Form:
    """The form of record from which a graph's source keys can be made; ValueError where there is none."""
    for made, form in (
        ({"tokens", "prompt_length"}, Reader.answers),
        ({"chosen", "rejected"}, Reader.pairs),
        ({"prompts"}, Reader.prompts),
    ):
        if set(keys) <= made:
            return form
    raise ValueError(f"no form of record yields the keys {', '.join(keys)}")


def _require(record: Fields, fields: tuple[str, ...], accepted: str) -> None:
    missing = [field for field in fields if field not in record]
    if missing:
        present = ", ".join(record) or "none"
        raise BadRecordError(f"no field {missing[0]!r} (fields: {present}); a record must be {accepted}")


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


def _messages(record: Fields, field: str) -> list[Fields]:
    value = record[field]
    if not isinstance(value, list) or not value or not all(isinstance(turn, dict) for turn in value):
        raise BadRecordError(f"field {field!r} must be a list of {{role, content}} messages")
    for turn in value:
        for part in ("role", "content"):
            _text(turn.get(part), f"{field}.{part}")
    return value
