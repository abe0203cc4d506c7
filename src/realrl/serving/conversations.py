"""Tokens of earlier conversations, so that sampled tokens are never tokenised again. Does not import torch."""

import hashlib
import json
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any


@dataclass(frozen=True)
class Remembered:
    """A conversation up to a turn of the model."""

    tokens: "array[int]"
    """Its prompt and the turn, as it was sampled."""
    text_length: int
    """Length of the text that the chat template wrote for the prompt, in characters."""
    text_digest: bytes
    """SHA-256 of this text."""

    def follows(self, text: str) -> bool:
        """Return whether `text` begins with the text of the prompt."""
        return _digest(text[: self.text_length]) == self.text_digest


class ConversationMemory:
    """The most recently used conversations, at most `max_tokens` tokens together."""

    def __init__(self, max_tokens: int) -> None:
        self._free, self._lock = max_tokens, Lock()
        self._kept: OrderedDict[bytes, Remembered] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, key: bytes) -> Remembered | None:
        """Find a conversation by the key of its messages, see `make_key`."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._kept.get(key)

    def keep(self, key: bytes, tokens: Sequence[int], text: str) -> None:
        """Keep the tokens of a conversation. `text`: the prompt as the chat template wrote it.

        Conversations that were not used for the longest time are dropped to make room.
        """
        made = Remembered(array("I", tokens), len(text), _digest(text))
        with self._lock:
            older = self._kept.pop(key, None)
            self._free += len(older.tokens) if older is not None else 0
            self._kept[key] = made
            self._free -= len(made.tokens)
            while self._free < 0:
                _, dropped = self._kept.popitem(last=False)
                self._free += len(dropped.tokens)


def make_key(messages: Sequence[Mapping[str, Any]], context: Sequence[Any]) -> bytes:
    """Make the key of a conversation from its messages, and from everything else that its prompt depends on.

    Empty fields of messages do not count, because clients add and drop them.
    """
    plain = [{name: value for name, value in message.items() if value} for message in messages]
    for message in plain:
        if "tool_calls" in message:
            message["tool_calls"] = [
                [call.get("id"), function.get("name"), function.get("arguments")]
                for call in message["tool_calls"]
                for function in [call.get("function") or call]
            ]
    return _digest(json.dumps([plain, *context], sort_keys=True))


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
