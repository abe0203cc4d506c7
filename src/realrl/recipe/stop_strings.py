"""Find stop strings, which are texts that end an answer, in its tokens. This module does not import torch."""

from collections.abc import Sequence
from typing import Any, Self

from realrl.recipe.generation import GenerationConfig

_INCOMPLETE = "\ufffd"
"""Text that the tokenizer returns for an incomplete character."""
_BYTES_OF_CHARACTER = 4
_MARGIN = 8
"""Number of additional tokens that are decoded before the longest stop string. Decoded text may lose blanks at its
start."""


class StopStrings:
    """Texts that end an answer when one of them appears in it, as in vLLM.

    The answer keeps its tokens up to the token that completes the stop string, but its text ends before the stop
    string. A stop string does not count if it is complete within the first `min_new_tokens` tokens.
    """

    @classmethod
    def of(cls, tokenizer: Any, sampling: GenerationConfig | None) -> Self | None:
        """Return the stop strings of a recipe; None if it has none."""
        return cls(tokenizer, sampling) if sampling is not None and sampling.stop else None

    def __init__(self, tokenizer: Any, sampling: GenerationConfig) -> None:
        self._tokenizer, self._stop, self._least = tokenizer, sampling.stop, sampling.min_new_tokens
        self._special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._vocabulary = len(tokenizer)
        # A token of text has at least one byte, so no stop string has more tokens than bytes.
        self._margin = max(len(text.encode()) for text in self._stop) + _MARGIN

    def find_end(self, tokens: Sequence[int], looked: int) -> int | None:
        """Find the number of tokens after which an answer ends; None if it continues.

        The first `looked` tokens were checked before, and do not end the answer. The result does not depend on how
        often an answer is checked.
        """
        # Decode only the last tokens: decoding a long answer again for each token would take longer than generating
        # it.
        before, new = self._select_last(tokens, looked), tokens[looked:]
        text = self._decode([*before, *new])
        if _INCOMPLETE not in text and not self._stands_in(text):
            return None
        # A window that begins inside a character may also lose the characters after it, so try several beginnings.
        windows = [before[start:] for start in range(min(len(before), _BYTES_OF_CHARACTER))]
        for count in range(1, len(new) + 1):
            near = (self._decode([*window, *new[:count]]) for window in windows or [[]])
            if any(map(self._stands_in, near)) and self._find(tokens[: looked + count]) is not None:
                return looked + count
        return None

    def cut(self, tokens: Sequence[int]) -> str:
        """Decode an answer without special tokens, up to its stop string."""
        text = self._decode(tokens)
        return text[: self._find(tokens)]

    def _find(self, tokens: Sequence[int]) -> int | None:
        """Find the start of the first stop string that is completed by the last token of an answer; None if there
        is none."""
        if len(tokens) <= self._least:
            return None
        before = len(self._decode(tokens[:-1]).rstrip(_INCOMPLETE))
        text = self._decode(tokens).rstrip(_INCOMPLETE)
        places = (text.find(stop, max(0, before - len(stop) + 1)) for stop in self._stop)
        return min((place for place in places if place >= 0), default=None)

    def _select_last(self, tokens: Sequence[int], looked: int) -> list[int]:
        """Select the last tokens among the first `looked` that are text, at most as many as the margin."""
        found: list[int] = []
        for position in reversed(range(looked)):
            token = tokens[position]
            if len(found) == self._margin:
                break
            if token < self._vocabulary and token not in self._special:
                found.append(token)
        return found[::-1]

    def _stands_in(self, text: str) -> bool:
        return any(stop in text for stop in self._stop)

    def _decode(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text
