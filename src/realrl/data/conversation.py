"""Conversations written with the chat template, and the positions of answers in the text.

Training and generation must see the same prompts, so an answer begins where the text that the template writes
for the turns before it, generation prompt included, ends.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import jinja2

from realrl.config.errors import UserError
from realrl.data.sources.rejects import BadRecordError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Message = dict[str, Any]
"""{role, content}, both text; a message that calls tools may have no content."""

_NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class Turn:
    """Position of an assistant turn in a text, in characters."""

    start: int
    """First character that the assistant writes."""
    content: int
    """End of its content; `start` where the template rewrites the content.
    
    The content may itself contain the text of an end-of-sequence token."""
    stop: int
    """End of all that the template writes for the turn."""


@dataclass(frozen=True)
class Conversation:
    """Text of a conversation: a prompt to generate from, or answers to learn from."""

    text: str
    turns: tuple[Turn, ...] = ()
    """Turns to learn, in order; none in a prompt."""
    cut: bool = False
    """Whether what the template writes behind the last turn's end of sequence is dropped."""

    @property
    def prompt(self) -> str:
        """Text before the last turn to learn, which is what generation would be given."""
        return self.text[: self.turns[-1].start] if self.turns else self.text


def write_prompt(
    tokenizer: "PreTrainedTokenizerFast", messages: list[Message], options: Mapping[str, Any] = _NO_OPTIONS
) -> Conversation:
    """Write a prompt for the turn after `messages`. `options`: arguments of the template besides them."""
    return Conversation(_render(tokenizer, messages, options, prompt=True))


def write_conversation(
    tokenizer: "PreTrainedTokenizerFast",
    messages: list[Message],
    train_on: Literal["all", "last"],
    *,
    after: int = 1,
    cut: bool = False,
    options: Mapping[str, Any] = _NO_OPTIONS,
) -> Conversation:
    """Write a conversation in which the last turn, or every assistant turn after the first `after`, is to learn.

    `options`: arguments of the template besides the messages.

    BadRecordError where it does not end with an answer, or the template writes a turn differently depending
    on what follows it, so that what is learnt would not be what is generated.
    """
    if messages[-1]["role"] != "assistant" or len(messages) == 1:
        raise BadRecordError(
            "a conversation to learn from must have several turns, and end with an assistant turn"
        )
    text = _render(tokenizer, messages, options, prompt=False)
    last = len(messages) - 1
    turns = [_turn(text, text, _render(tokenizer, messages[:last], options, prompt=True), messages[last])]
    for i in range(last - 1, max(after, 1) - 1, -1):
        if train_on == "all" and messages[i]["role"] == "assistant":
            before = _render(tokenizer, messages[:i], options, prompt=True)
            written = _render(tokenizer, messages[: i + 1], options, prompt=False)
            turns.insert(0, _turn(text, written, before, messages[i]))
    return Conversation(text, tuple(turns), cut)


def _turn(text: str, written: str, before: str, message: Message) -> Turn:
    """Find the turn at the end of `written`, where `before` is the prompt for it and `text` the conversation."""
    if not written.startswith(before):
        raise BadRecordError(
            "the chat template writes the turns before an answer differently once it follows, so the answer "
            "cannot be told apart; use {prompt, answer} or another template"
        )
    if not text.startswith(written):
        raise BadRecordError(
            "the chat template writes an earlier assistant turn differently once others follow, so not all "
            "of them can be trained on; use data.train_on=last or another template"
        )
    content = message.get("content", "").strip()
    found = written.find(content, len(before)) if content else -1
    return Turn(len(before), len(before) if found < 0 else found + len(content), len(written))


def _render(
    tokenizer: "PreTrainedTokenizerFast", messages: list[Message], options: Mapping[str, Any], *, prompt: bool
) -> str:
    if not tokenizer.chat_template:
        name = tokenizer.name_or_path
        raise UserError(f"tokenizer {name} has no chat template, which records with messages need")

    try:
        text = tokenizer.apply_chat_template(
            messages, tokenize=False, **{**options, "add_generation_prompt": prompt}
        )
    except Exception as error:  # a template is a program, which may fail in any way
        known = isinstance(error, jinja2.TemplateError | TypeError | ValueError)
        reason = str(error) if known else f"{type(error).__name__}: {error}"
        raise BadRecordError(f"the chat template refuses the messages: {reason}") from None
    assert isinstance(text, str)
    return text
