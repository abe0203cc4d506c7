"""Texts of conversations that an environment takes part in: the end of the prompt, and observations.

Sampled tokens are never written again. After a turn of the model come the tokens that the chat template writes
between this turn and the next: the end of the turn if the model has not written it, the messages of the
environment, and the beginning of the model's next turn. These are what the template adds to a short conversation
made up for this purpose, so they do not depend on what was sampled.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from realrl.config.errors import UserError
from realrl.data.chat_template import ChatTemplate, Message
from realrl.data.rejects import BadRecordError
from realrl.data.tools import Arguments
from realrl.recipe.stop_strings import StopStrings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Observation = str | Sequence[Message] | None

_ASKED, _ANSWERED, _THOUGHT = "What comes next?", "This comes next.", "<think>\nI see.\n</think>\n\n"
_CALL_ID = "call00000"
"""Beginning of the ids of tool calls. Some templates require ids of nine letters and digits."""


class TurnTemplate:
    """Writes what stands between the turns of a model, as tokens.

    With a tokenizer that has no chat template, observations are plain text.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerFast",
        options: Mapping[str, Any],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        stop_token_ids: Sequence[int],
        longest: int,
        earlier_turns: Literal["refuse", "keep"],
        takes_prompt: bool = False,
    ) -> None:
        """`tools`: schemas that the prompt shows; None if the environment has no tools. `longest`: maximum tokens
        of an observation's text. `takes_prompt`: whether the environment gets the prompt itself, too.

        Raises UserError if the chat template cannot be used.
        """
        self._tokenizer, self._longest = tokenizer, longest
        self._tools = tools
        self.takes_prompt = takes_prompt
        self.template: ChatTemplate | None = None
        """The chat template for prompts, which stop before the end of their last turn; None for plain text."""
        if not tokenizer.chat_template:
            if tools is not None:
                raise UserError(
                    f"environment: tokenizer {tokenizer.name_or_path} has no chat template, which tools need"
                )
            return
        shown = dict(options) if tools is None else {**options, "tools": list(tools)}
        self.template = ChatTemplate(tokenizer, shown, opens=True)
        self._ends = [tokenizer.convert_ids_to_tokens(token) for token in stop_token_ids]
        try:
            self._check(self.template, refuse=earlier_turns == "refuse")
        except BadRecordError as error:
            raise UserError(f"environment: {error}") from None

    def check_record(self, record: Mapping[str, Any]) -> None:
        """Check the arguments of the chat template in a record. Raises BadRecordError if turns cannot have them.

        All turns of a run are written with the same arguments.
        """
        if record.get("chat_template_kwargs"):
            raise BadRecordError(
                "field 'chat_template_kwargs' is not for an environment; use data.chat_template_kwargs, which is"
                " for all records"
            )
        if self._tools is not None and record.get("tools") and self.template is not None:
            raise BadRecordError(
                "field 'tools' is not for an environment that has tools; data.columns={tools: NAME} renames it"
            )

    def open(self, observation: Observation) -> list[int]:
        """Write the tokens after a prompt: the first observation, and the beginning of the model's turn.

        A text continues the last message of the prompt.
        """
        text, further = "", list[Message]()
        if isinstance(observation, str):
            text = self.shorten([{"role": "user", "content": observation}])[0]["content"]
        else:
            further = self.shorten(observation or ())
        if self.template is None:
            return self._encode(text + _join(further))
        asked = {"role": "user", "content": _ASKED}
        written = replace(self.template, opens=False).render([asked, *further], prompt=True)
        return self._encode(text + written[written.index(_ASKED) + len(_ASKED) :])

    def observe(self, observation: Observation, last: int) -> list[int]:
        """Write the tokens between a turn of the model, whose last token is `last`, and the model's next turn."""
        if isinstance(observation, str):
            observation = [{"role": "user", "content": observation}]
        messages = self.shorten(observation or ())
        if self.template is None:
            return self._encode(_join(messages))
        tokens = self._encode(self._write(self.template, messages))
        # The model has usually written the end of its turn itself.
        return tokens[1:] if tokens[:1] == [last] else tokens

    def read(self, tokens: Sequence[int], stop_token_ids: Collection[int], stop: StopStrings | None) -> str:
        """Decode a turn of the model, without the token or the stop string that ended it.

        If there are tools, special tokens and stop strings are kept, because they may belong to calls.
        """
        said = list(tokens[:-1] if tokens[-1] in stop_token_ids else tokens)
        if self._tools is None and stop is not None:
            return stop.cut(said)
        text: str = self._tokenizer.decode(said, skip_special_tokens=self._tools is None)
        return text

    def _write(self, template: ChatTemplate, messages: Sequence[Message], thought: str = "") -> str:
        """Write the text between a turn of the model and the next, with the end of the turn.

        Raises BadRecordError if the template writes the turn differently when messages follow.
        """
        turn: Message = {"role": "assistant", "content": thought + _ANSWERED}
        results = [message for message in messages if message["role"] == "tool"]
        numbered = iter(range(len(results)))
        further = [
            {**message, "tool_call_id": f"{_CALL_ID[:-1]}{next(numbered) % 10}"}
            if message["role"] == "tool"
            else message
            for message in messages
        ]
        if results:
            turn["tool_calls"] = [
                {"id": f"{_CALL_ID[:-1]}{i % 10}", "type": "function",
                 "function": {"name": result.get("name") or "tool", "arguments": Arguments({}, "{}")}}
                for i, result in enumerate(results)
            ]  # fmt: skip
        conversation = [{"role": "user", "content": _ASKED}, turn]
        plain = replace(template, opens=False)
        before = plain.render(conversation, prompt=False)
        whole = plain.render([*conversation, *further], prompt=True)
        if not whole.startswith(before):
            raise BadRecordError("the chat template writes a turn differently once other turns follow")
        start = before.find(_ANSWERED) + len(_ANSWERED)
        end = max((before.rfind(token, start) for token in self._ends), default=-1)
        if end < 0 and results:
            raise BadRecordError(
                "the chat template does not end a turn with a token that ends generation, so the end of a tool call"
                " cannot be found; set generation.stop_token_ids"
            )
        return before[end if end >= 0 else start :] + whole[len(before) :]

    def _check(self, template: ChatTemplate, *, refuse: bool) -> None:
        """Write an observation of each kind. Raises BadRecordError if the template does not support it."""
        role = "user" if self._tools is None else "tool"
        messages = [{"role": role, "name": "tool", "content": "It is so."}]
        self._write(template, messages)
        if refuse:
            try:
                self._write(template, messages, _THOUGHT)
            except BadRecordError:
                raise BadRecordError(
                    "the chat template drops the reasoning of earlier turns once others follow, so no single"
                    " sequence is what the model would see; environment.earlier_turns=keep keeps every turn as it"
                    " was sampled, or give another template as data.chat_template"
                ) from None

    def shorten(self, messages: Sequence[Message]) -> list[Message]:
        """Cut the texts of messages to the maximum number of tokens together."""
        left, kept = self._longest, list[Message]()
        for message in messages:
            ids = self._encode(message["content"])
            if len(ids) > left:
                message = {
                    **message,
                    "content": self._tokenizer.decode(ids[:left], skip_special_tokens=False),
                }
            left = max(0, left - len(ids))
            kept.append(message)
        return kept

    def _encode(self, text: str) -> list[int]:
        if not text:
            return []
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids


def _join(messages: Sequence[Message]) -> str:
    """Join the texts of messages."""
    return "".join(message["content"] for message in messages)
