"""Turns of the model, divided into content and tool calls while they arrive. Does not import torch."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from realrl.environments.tool_calls import ToolCall, read_calls

_MARKS = {"hermes": "<tool_call>", "mistral": "[TOOL_CALLS]", "llama3": "<|python_tag|>"}
"""Format of tool calls -> text that begins a call."""
_THOUGHT = "</think>"


class TurnReader:
    """Divides the text of a turn into content and tool calls.

    Content is returned as it arrives. Text is held back as soon as it may belong to a call. Calls are read when the
    turn is complete. If one of them cannot be read, the whole text is content.
    """

    def __init__(self, form: str | None, tools: Sequence[Mapping[str, Any]]) -> None:
        """`form`: format of the calls, see `environments.tool_calls`. `tools`: schemas; empty if there are none."""
        self._form, self._tools = form, tools
        self._text, self._sent = "", ""

    @property
    def reads_special(self) -> bool:
        """Whether the text must have its special tokens."""
        return bool(self._tools) or self._form == "gpt_oss"

    def add(self, text: str) -> str:
        """Add text, and return the content that is known now."""
        if not self.reads_special:
            return text
        self._text += text
        return self._send(self._find_content(final=False))

    def finish(self, *, cut: bool) -> tuple[str, list[ToolCall]]:
        """Return the rest of the content, and the calls. A turn that was `cut` calls nothing."""
        if not self.reads_special:
            return "", []
        calls = [] if cut or not self._tools else read_calls(self._text, self._form or "", self._tools)
        if calls and not any(call.problem for call in calls):
            return self._send(self._find_content(final=False)), calls
        return self._send(self._find_content(final=True)), []

    def _send(self, content: str) -> str:
        if not content.startswith(self._sent):
            return ""
        new = content[len(self._sent) :]
        self._sent = content
        return new

    def _find_content(self, *, final: bool) -> str:
        """Find the content of the text so far. `final`: whether everything that was held back is content, too."""
        if self._form == "gpt_oss":
            return _read_channels(self._text, calls=final and bool(self._tools))
        # White space before a call does not belong to the content.
        return self._text if final else self._text[: self._find_call()].rstrip()

    def _find_call(self) -> int:
        """Find the position at which a call begins or may begin; the end of the text if there is none."""
        text, mark = self._text, _MARKS[self._form or ""]
        # As in read_calls: text in a block of reasoning is not a call.
        begin = text.rfind(_THOUGHT) + len(_THOUGHT) if _THOUGHT in text else 0
        thinks = text.find("<think>", begin)
        end = len(text) if thinks < 0 else thinks
        place = text.find(mark, begin, end)
        if place >= 0:
            return place
        if self._form == "llama3" and text[begin:end].lstrip().startswith("{"):
            return begin
        if thinks >= 0:
            return len(text)
        begun = next((n for n in range(len(mark) - 1, 0, -1) if text.endswith(mark[:n])), 0)
        return len(text) - begun


def _read_channels(text: str, *, calls: bool) -> str:
    """Read what gpt-oss says to the user: its channels, except `analysis`, and calls only if `calls`."""
    if not text.startswith("<|"):
        return text
    said = []
    for part in text.split("<|start|>"):
        header, _, body = part.partition("<|message|>")
        channel = re.search(r"<\|channel\|>\s*(\w+)", header)
        if channel is not None and channel[1] != "analysis" and (calls or "to=" not in header):
            said.append(re.split(r"<\|(?:end|return|call)\|>", body)[0])
    return "".join(said)
