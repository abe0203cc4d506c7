"""Prompts: from the messages of a request to tokens. Does not import torch."""

import copy
import inspect
import json
import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Self

from realrl.config.errors import UserError
from realrl.data.chat_template import ChatTemplate
from realrl.data.record_forms import Text, read_messages
from realrl.data.rejects import BadRecordError
from realrl.data.tokenization import tokenize
from realrl.data.turn_template import TurnTemplate
from realrl.environments.tool_calls import find_format
from realrl.serving.conversations import ConversationMemory, make_key
from realrl.serving.refusal import RefusedError
from realrl.serving.requests import Chat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_REWRITES = (
    "the chat template writes earlier turns differently once others follow, so their sampled tokens are not used"
    " again; such conversations are tokenised as a whole"
)
_TEMPLATES_KEPT = 64
"""Number of lists of tools for which the texts between turns are kept."""
_UNLIMITED = 10**9


@dataclass(frozen=True)
class Prompt:
    """Tokens to continue."""

    tokens: Sequence[int]
    text: str = ""
    """What the chat template writes for the whole conversation; empty if no template was used."""
    remembered: int = 0
    """Number of tokens that come from an earlier conversation, as they were sampled."""


class PromptWriter:
    """Writes prompts as tokens, with the tokenizer's chat template.

    A conversation that continues a remembered one begins with exactly its tokens, and the new messages follow. This
    requires that the template does not change earlier turns when others follow. With `earlier_turns="keep"`, the
    earlier tokens are used in any case, as training does with `environment.earlier_turns=keep`.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerFast",
        *,
        stop_token_ids: Sequence[int],
        memory: ConversationMemory | None,
        earlier_turns: Literal["template", "keep"] = "template",
        tool_format: str | None = None,
        options: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """`stop_token_ids`: tokens that end a turn of the model. `tool_format`: see `environment.tool_format`;
        None if it follows from the chat template. `options`: arguments of the chat template for requests that do
        not give them."""
        self._tokenizer, self._stop_token_ids, self._options = tokenizer, list(stop_token_ids), options
        self._memory, self._keeps = memory, earlier_turns == "keep"
        given: Any = tokenizer.chat_template or ""
        self._template = given if isinstance(given, str) else "\n".join(given.values())
        self.tool_format = tool_format or find_format(self._template)
        """How the model writes tool calls; None if it is not known."""
        parameters = inspect.signature(tokenizer.apply_chat_template).parameters
        self._reserved = {*parameters, "messages", "bos_token", "eos_token"}
        self._turns: OrderedDict[str, TurnTemplate] = OrderedDict()
        self._noted: set[str] = set()

    def with_memory(self, memory: ConversationMemory) -> Self:
        """Return a writer with a memory of its own, which shares everything else."""
        other = copy.copy(self)
        other._memory = memory
        return other

    def write_text(self, text: str) -> Prompt:
        """Write a prompt of plain text, as training does: the tokenizer's beginning of sequence stands before it.

        Raises RefusedError if the text has half a surrogate pair.
        """
        _check_characters(text, "prompt")
        return Prompt(tokenize([Text(text, None)], self._tokenizer, ())[0].ids)

    def write_chat(self, chat: Chat) -> Prompt:
        """Write a conversation, and the beginning of the model's turn.

        Raises RefusedError if the chat template cannot write it.
        """
        self._check(chat)
        chat = self._adapt(chat)
        try:
            text = self._render(chat)
        except BadRecordError as error:
            raise RefusedError(str(error), param="messages") from None
        _check_characters(text, "messages")
        recalled = self._recall(chat, text)
        if recalled is not None:
            return recalled
        return Prompt(self._tokenizer(text, add_special_tokens=False)["input_ids"], text)

    def remember(
        self, chat: Chat, prompt: Prompt, message: Mapping[str, Any], sampled: Sequence[int]
    ) -> None:
        """Remember a turn of the model. `message`: the turn as the client gets it. `sampled`: its tokens."""
        if self._memory is None or not prompt.text or chat.ending != "asked" or not sampled:
            return
        said = read_messages({"messages": [{**message, "content": message.get("content") or ""}]}, "messages")
        chat = self._adapt(chat)
        key = self._make_key(chat, [*chat.messages, *said])
        self._memory.keep(key, [*prompt.tokens, *sampled], prompt.text)

    def check_tools(self, chat: Chat) -> None:
        """Raise RefusedError if the calls of a chat's tools could not be read."""
        if chat.tools and self.tool_format is None:
            raise RefusedError("the chat template has no known format of tool calls", param="tools")

    def _check(self, chat: Chat) -> None:
        if not self._template:
            raise RefusedError("the model's tokenizer has no chat template; use /v1/completions")
        for name in chat.options:
            if name in self._reserved:
                raise RefusedError(
                    f"{name} is not an argument for the template", param="chat_template_kwargs"
                )
            if name not in self._template:
                param = "reasoning_effort" if name == "reasoning_effort" else "chat_template_kwargs"
                raise RefusedError(f"the chat template does not use {name[:80]!r}", param=param)

    def _adapt(self, chat: Chat) -> Chat:
        """Name the tools of results, use the role `system` if the template does not know `developer`, and add the
        arguments of the template that the request does not give."""
        names = {
            call.get("id"): (call.get("function") or {}).get("name")
            for message in chat.messages
            for call in message.get("tool_calls") or ()
        }
        messages = []
        for message in chat.messages:
            name = names.get(message.get("tool_call_id"))
            if message["role"] == "tool" and "name" not in message and name:
                message = {**message, "name": name}
            if message["role"] == "developer" and "developer" not in self._template:
                message = {**message, "role": "system"}
            messages.append(message)
        return replace(chat, messages=messages, options={**self._options, **chat.options})

    def _render(self, chat: Chat) -> str:
        template = ChatTemplate(self._tokenizer, self._list_options(chat))
        return template.render(chat.messages, prompt=chat.ending == "asked")

    def _list_options(self, chat: Chat) -> dict[str, Any]:
        options = {**chat.options, "tools": chat.tools} if chat.tools else dict(chat.options)
        return {**options, "continue_final_message": True} if chat.ending == "continued" else options

    def _recall(self, chat: Chat, text: str) -> Prompt | None:
        """Continue a remembered conversation; None if there is none, or if the template does not allow it."""
        turns = [i for i, message in enumerate(chat.messages) if message["role"] == "assistant"]
        after = turns[-1] + 1 if turns else 0
        if self._memory is None or chat.ending != "asked" or not 0 < after < len(chat.messages):
            return None
        earlier = chat.messages[:after]
        found = self._memory.find(self._make_key(chat, earlier))
        if found is None:
            return None
        try:
            if not self._keeps:
                before = self._render(replace(chat, messages=earlier, ending=""))
                if not (found.follows(text) and text.startswith(before)):
                    self._note(_REWRITES)
                    return None
            between = self._find_turns(chat).observe(chat.messages[after:], found.tokens[-1])
        except (BadRecordError, UserError) as error:
            self._note(f"a conversation is tokenised as a whole: {error}")
            return None
        return Prompt([*found.tokens, *between], text, remembered=len(found.tokens))

    def _find_turns(self, chat: Chat) -> TurnTemplate:
        name = json.dumps([chat.tools, chat.options], sort_keys=True)
        if name not in self._turns:
            self._turns[name] = TurnTemplate(
                self._tokenizer,
                chat.options,
                tools=chat.tools or None,
                stop_token_ids=self._stop_token_ids,
                longest=_UNLIMITED,
                earlier_turns="keep",  # `_recall` checks the messages themselves
            )
        self._turns.move_to_end(name)
        while len(self._turns) > _TEMPLATES_KEPT:
            self._turns.popitem(last=False)
        return self._turns[name]

    def _make_key(self, chat: Chat, messages: Sequence[Mapping[str, Any]]) -> bytes:
        return make_key(messages, (chat.tools, chat.options, chat.key))

    def _note(self, message: str) -> None:
        if message not in self._noted:
            self._noted.add(message)
            logging.getLogger("realrl.serving").warning(message)


def _check_characters(text: str, param: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RefusedError(
            f"{param} contains half a surrogate pair, which is no character", param=param
        ) from None
