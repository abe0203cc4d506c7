"""Text of sampled tokens, decoded token by token, and stop strings in it. Does not import torch."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_INCOMPLETE = "\ufffd"
"""Text that the tokenizer returns for an incomplete character."""
_CONTEXT = 8
"""Tokens of a prompt that are decoded before an answer, so that the answer keeps the blank at its start."""


class TokenTexts:
    """Texts of the tokens of a tokenizer."""

    def __init__(self, tokenizer: "PreTrainedTokenizerFast") -> None:
        self._tokenizer, self._vocabulary = tokenizer, len(tokenizer)
        self._special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._bytes = _list_letters()

    def has_text(self, token: int, keep_special: bool) -> bool:
        """Return whether a token is text. A model may have more tokens than its tokenizer."""
        return token < self._vocabulary and (keep_special or token not in self._special)

    def decode(self, tokens: Sequence[int]) -> str:
        """Decode tokens, with special tokens."""
        text: str = self._tokenizer.decode(
            list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def name(self, token: int) -> tuple[str, list[int] | None]:
        """Return the text of a single token and its bytes. The bytes are None if they are not known."""
        text = self.decode([token]) if token < self._vocabulary else ""
        if _INCOMPLETE not in text:
            return text, list(text.encode())
        piece = str(self._tokenizer.convert_ids_to_tokens(token))
        if (byte := re.fullmatch(r"<0x([0-9A-F]{2})>", piece)) is not None:
            return text, [int(byte[1], 16)]
        known = all(letter in self._bytes for letter in piece)
        return text, [self._bytes[letter] for letter in piece] if known else None


class TextDecoder:
    """Decodes an answer, one token after the other. No text ends inside a character."""

    def __init__(self, texts: TokenTexts, *, prompt: Sequence[int] = (), keep_special: bool = False) -> None:
        """`prompt`: tokens that the text of the answer continues; none if the answer stands for itself."""
        self._texts, self._keeps = texts, keep_special
        self._window = [token for token in prompt[-_CONTEXT:] if texts.has_text(token, False)]
        self._known = len(self._window)
        """Number of tokens in the window whose text is complete."""
        self._given = len(self._decode().rstrip(_INCOMPLETE))
        """Characters of the window's text that were returned before."""

    def add(self, token: int) -> str:
        """Return the text that a token completes."""
        if not self._texts.has_text(token, self._keeps):
            return ""
        self._window.append(token)
        text = self._decode()
        ready = text.rstrip(_INCOMPLETE)
        new = ready[self._given :]
        self._given = max(self._given, len(ready))
        if new and ready == text:
            # Decoding is linear only if the window stays short. Its first tokens give the next ones their context.
            self._window = self._window[self._known :]
            self._known, self._given = len(self._window), len(self._decode())
        return new

    def finish(self) -> str:
        """Return the rest of the text, which ends with an incomplete character if there is any."""
        return self._decode()[self._given :]

    def _decode(self) -> str:
        return self._texts.decode(self._window) if self._window else ""


class StopFinder:
    """Finds stop strings in a text that arrives in parts, and holds back what may be the beginning of one.

    The rules are the same as in `recipe.stop_strings`. The text ends before the stop string. A stop string that is
    complete within the first `min_tokens` tokens does not count.
    """

    def __init__(self, stop: Sequence[str], min_tokens: int) -> None:
        self._stop, self._least = stop, min_tokens
        self._held = ""

    def add(self, text: str, tokens: int) -> tuple[str, bool]:
        """Add text that token number `tokens` completes. Returns text to send, and whether the answer ends."""
        if not self._stop or not text:
            return text, False
        before, whole = len(self._held), self._held + text
        places = (whole.find(stop, max(0, before - len(stop) + 1)) for stop in self._stop)
        place = min((place for place in places if place >= 0), default=None)
        if place is not None and tokens > self._least:
            self._held = ""
            return whole[:place], True
        held = max(_count_begun(whole, stop) for stop in self._stop)
        self._held = whole[len(whole) - held :]
        return whole[: len(whole) - held], False

    def finish(self) -> str:
        """Return the text that was held back."""
        held, self._held = self._held, ""
        return held


def _count_begun(text: str, stop: str) -> int:
    """Count the characters at the end of a text that are the beginning of a stop string, but not all of it."""
    longest = min(len(text), len(stop) - 1)
    return next((count for count in range(longest, 0, -1) if text.endswith(stop[:count])), 0)


def _list_letters() -> dict[str, int]:
    """List the letters with which byte-level tokenizers write bytes."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {**{chr(byte): byte for byte in plain}, **{chr(256 + i): byte for i, byte in enumerate(others)}}
