"""Conversations written with the chat template, and the positions of answers in the text.

Training and generation must see the same prompts. An answer therefore begins at the end of the text that the
template writes for the earlier turns with the generation prompt.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import jinja2

from realrl.config.errors import UserError
from realrl.data.rejects import BadRecordError
from realrl.data.tools import find_arguments, write_arguments

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Message = dict[str, Any]
"""{role, content}, both text; a message with tool calls may lack content."""

_REWRITTEN = (
    "the chat template writes the turns before an answer differently once it follows, so the answer cannot be told"
    " apart; give another template as data.chat_template"
)
_PROBE = "What is an answer?"
_MARK = "[end of the message]"


@dataclass(frozen=True)
class Turn:
    """Position of an assistant turn in a text, in characters."""

    start: int
    """First character of the assistant's text."""
    content: int
    """End of the answer's content; `start` if the template rewrites the content.
    
    The content may itself contain the text of an end-of-sequence token."""
    stop: int
    """End of the template's text for the turn."""


@dataclass(frozen=True)
class Conversation:
    """Text of a conversation: a prompt for generation, or answers for training."""

    text: str
    turns: tuple[Turn, ...] = ()
    """Turns to train on, in order; none in a prompt."""
    cut: bool = False
    """Whether text after the last turn's end of sequence is dropped."""
    last: str = ""
    """Content of the last message of a prompt."""

    @property
    def prompt(self) -> str:
        """Text before the last turn to train on: the prompt of generation."""
        return self.text[: self.turns[-1].start] if self.turns else self.text


@dataclass(frozen=True)
class ChatTemplate:
    """The chat template of a tokenizer, with further arguments."""

    tokenizer: "PreTrainedTokenizerFast"
    options: Mapping[str, Any] = field(default_factory=dict)
    opens: bool = False
    """Whether prompts stop before the end of their last message, which an environment may continue."""

    def write_prompt(self, messages: list[Message]) -> Conversation:
        """Write a prompt for the turn after `messages`.

        Raises BadRecordError if the prompt should stop before the end of its last message, and the template does
        not write this message as it is.
        """
        if self.opens:
            content = messages[-1].get("content", "")
            text, found, _ = self.render(
                [*messages[:-1], {**messages[-1], "content": content + _MARK}], prompt=True
            ).rpartition(_MARK)
            if not found:
                raise BadRecordError("the chat template does not write the end of the last message as it is")
            return Conversation(text, last=content)
        return Conversation(self.render(messages, prompt=True), last=messages[-1].get("content", ""))

    def write_conversation(
        self, messages: list[Message], train_on: Literal["all", "last"], *, after: int = 1
    ) -> list[Conversation]:
        """Write a conversation for training.

        Training is on the last assistant turn, or on all assistant turns after the first `after` turns. Turns with
        `weight` 0 are not trained on.

        If the template writes every turn independently of later turns, the result is one conversation. Otherwise
        each turn to train on becomes a conversation, which consists of the prompt of generation and the answer.
        Raises BadRecordError if there is no turn to train on, or if an answer cannot be separated from its prompt.
        """
        if len(messages) == 1:
            raise BadRecordError(
                "a conversation to learn from must have several turns, and this one has a single one"
            )
        if messages[-1]["role"] != "assistant":
            raise BadRecordError(
                f"a conversation to learn from must end with role 'assistant', not {messages[-1]['role'][:40]!r}"
            )
        answers = [i for i in range(max(after, 1), len(messages)) if messages[i]["role"] == "assistant"]
        learnt = [i for i in answers if messages[i].get("weight", 1)]
        if not learnt:
            raise BadRecordError("every answer has weight 0, so there is nothing to learn")
        written = [
            self._write_answer(messages[: i + 1]) for i in (learnt if train_on == "all" else learnt[-1:])
        ]
        last = written[-1]
        if all(last.text.startswith(one.text) for one in written):
            return [Conversation(last.text, tuple(one.turns[0] for one in written))]
        return written

    def write_side(self, messages: list[Message], after: int) -> Conversation:
        """Write one side of a pair. The first `after` turns are the prompt, and all later turns are the answer.

        Raises BadRecordError if the template writes an answer differently when other turns follow, because then no
        single sequence has the text of generation.
        """
        last = self._write_answer(messages)
        if len(messages) == after + 1:
            return replace(last, cut=True)
        before = self.render(messages[:after], prompt=True)
        answers = [i for i in range(after, len(messages)) if messages[i]["role"] == "assistant"]
        texts = [self._write_answer(messages[: i + 1]).text for i in answers]
        if not all(last.text.startswith(text) for text in (before, *texts)):
            raise BadRecordError(
                "the chat template writes an earlier answer differently once others follow, so several turns cannot"
                " be compared as one answer; give sides of one turn each, or another template as data.chat_template"
            )
        return Conversation(last.text, (replace(last.turns[0], start=len(before)),), cut=True)

    def find_turn_end(self) -> int | None:
        """Find the special token that the template writes directly after an answer; None if there is none.

        Templates such as Gemma's end a turn with a token that is not the tokenizer's end of sequence.
        """
        if not self.tokenizer.chat_template:
            return None
        messages: list[Message] = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": _PROBE},
        ]
        try:
            text = self.render(messages, prompt=False)
        except BadRecordError:
            return None  # reading records reports this error
        _, found, behind = text.rpartition(_PROBE)
        if not found or not behind.strip():
            return None
        first = self.tokenizer(behind.lstrip(), add_special_tokens=False)["input_ids"][0]
        added = self.tokenizer.added_tokens_decoder.get(first)
        return first if added is not None and added.special else None

    def _write_answer(self, messages: list[Message]) -> Conversation:
        """Write the last turn as the answer to the template's prompt for the earlier turns."""
        message = messages[-1]
        prompt, written = self.render(messages[:-1], prompt=True), self.render(messages, prompt=False)
        if written.startswith(prompt):
            answer = written[len(prompt) :]
        else:
            before = self.render(messages[:-1], prompt=False)
            opening = prompt[_count_alike(prompt, before) :]
            answer = _find_answer(prompt, opening, written, messages[-2].get("content", "").strip(), message)
        content = message.get("content", "").strip()
        found = answer.find(content) if content else -1
        text, start = prompt + answer, len(prompt)
        turn = Turn(start, start if found < 0 else start + found + len(content), len(text))
        return Conversation(text, (turn,))

    def render(self, messages: list[Message], *, prompt: bool) -> str:
        """Write messages. `prompt`: whether the beginning of the model's turn follows.

        Raises BadRecordError if the template refuses the messages.
        """
        if not self.tokenizer.chat_template:
            name = self.tokenizer.name_or_path
            raise UserError(f"tokenizer {name} has no chat template, which records with messages need")
        options = {**self.options, "add_generation_prompt": prompt}

        def render(messages: list[Message]) -> str:
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, **options)
            assert isinstance(text, str)
            return text

        try:
            return _choose_arguments(render, messages)
        except Exception as error:  # a template is a program and may raise anything
            known = isinstance(error, jinja2.TemplateError | TypeError | ValueError)
            reason = str(error) if known else f"{type(error).__name__}: {error}"
            raise BadRecordError(f"the chat template refuses the messages: {reason}") from None


def _find_answer(prompt: str, opening: str, written: str, asked: str, message: Message) -> str:
    """Find the text of generation after `prompt`, if the whole conversation `written` does not begin with it.

    The template may write earlier turns differently when the answer follows. It may also end a prompt with more
    text than it writes before an answer: `<think>`, or an empty block of reasoning. `opening`: what the template
    adds to the earlier turns to open an answer. `asked`: content of the turn before the answer.
    """
    content = message.get("content", "").strip().rpartition("</think>")[2].strip()
    ends = written.rfind(content) if content in written else len(written)
    block = re.fullmatch(r"(.+?)<(\w+)>\s*(</\2>)?\s*", opening, re.DOTALL)
    header = block[1] if block else opening
    place = written.rfind(header, 0, ends) if header else -1
    if place >= 0:
        answer = written[place + len(header) :]
        return _follow_reasoning(answer, block[2], bool(block[3]), message) if block else answer
    # No known text opens the answer, so search from the end of the turn before.
    start = prompt.rfind(asked)
    place = written.rfind(asked, 0, ends) if asked else -1
    if min(start, place) < 0:
        raise BadRecordError(_REWRITTEN)
    end, tail = prompt[start:], written[place:]
    same = _count_alike(end, tail)
    if same < len(end) and not (content and tail[same:].startswith(content)):
        raise BadRecordError(_REWRITTEN)
    return tail[same:]


def _count_alike(a: str, b: str) -> int:
    """Count the characters of the common beginning of two texts."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (one, other) in pairs if one != other), min(len(a), len(b)))


def _follow_reasoning(answer: str, tag: str, closed: bool, message: Message) -> str:
    """Write an answer after a prompt that ends with `<tag>`, or, if `closed`, with an empty block of reasoning.

    The template may have dropped the reasoning from `answer`, as many templates do in earlier turns. An answer
    without reasoning begins by closing the block.
    """
    opener, closer = f"<{tag}>", f"</{tag}>"
    if closed:
        answer = re.sub(rf"^\s*{opener}\s*{closer}\s*", "", answer)
        if closer in answer:
            raise BadRecordError(
                "the chat template ends the prompt with an empty block of reasoning, and the answer has reasoning;"
                " change chat_template_kwargs, or remove the reasoning"
            )
        return answer
    if closer in answer:
        return answer.removeprefix(opener).lstrip()
    content = message.get("content", "")
    reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
    if closer in content:
        reasoning = content.partition(closer)[0].strip().removeprefix(opener)
    reasoning = reasoning.strip() if isinstance(reasoning, str) else ""
    return f"{reasoning}\n{closer}\n\n{answer.lstrip()}".lstrip("\n")


def _choose_arguments(render: Callable[[list[Message]], str], messages: list[Message]) -> str:
    """Render arguments of tool calls as objects, or as the record's JSON text if the template needs text."""
    found = list(find_arguments(messages))
    try:
        text = render(messages)
    except TypeError:
        # The template may append the arguments to text, which fails for objects.
        if not found:
            raise
        return render(write_arguments(messages))
    # A template that prints arguments directly would print an object in Python's syntax.
    forms = [form for form in (str(dict(arguments)) for arguments in found if arguments) if form in text]
    if not forms:
        return text
    try:
        other = render(write_arguments(messages))
    except Exception:  # the template needs objects
        return text
    # If only a message quotes this form, the count does not change, and the first text is right.
    return other if any(other.count(form) < text.count(form) for form in forms) else text
