"""One sample of a request, from the engine's pieces to news for the client. Does not import torch."""

import hashlib
import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from realrl.environments.tool_calls import ToolCall
from realrl.serving.decoding import StopFinder, TextDecoder, TokenTexts
from realrl.serving.engine import Piece
from realrl.serving.turns import TurnReader


@dataclass
class Delta:
    """News about a sample; all deltas of a sample added up are the sample."""

    text: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    """Tool calls in OpenAI's form."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    """Length of the sample's text before each token."""
    finish: str | None = None
    """`stop`, `length` or `tool_calls`; None if the sample continues."""

    def add(self, other: "Delta") -> None:
        """Append the delta that follows."""
        self.text += other.text
        self.finish = other.finish
        for name in ("calls", "tokens", "logprobs", "offsets"):
            getattr(self, name).extend(getattr(other, name))


class Sample:
    """Reads the pieces of one sample."""

    def __init__(
        self,
        texts: TokenTexts,
        prompt: Sequence[int],
        *,
        stop: Sequence[str],
        min_tokens: int,
        continues: bool = False,
        form: str | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        keep_special: bool = False,
    ) -> None:
        """`continues`: whether the sample continues the text of the prompt. `form` and `tools` are as in
        `TurnReader`."""
        self._prompt, self._tokens = prompt, array("q")
        self._turn = TurnReader(form, tools)
        keep_special = keep_special or self._turn.reads_special
        self._decoder = TextDecoder(texts, prompt=prompt if continues else (), keep_special=keep_special)
        self._stop = StopFinder(stop, min_tokens)
        self._length = 0
        self.cached_tokens = 0
        """Prompt tokens that came from a cache."""
        self.finished = False
        """Whether the sample is complete."""

    def read(self, piece: Piece) -> Delta:
        """Read a piece. After a stop string, the other tokens of the piece are dropped."""
        if not self._tokens:
            self.cached_tokens = piece.cached_tokens
        delta = Delta()
        last = len(piece.tokens) - 1
        for i, (token, logprob) in enumerate(zip(piece.tokens, piece.logprobs, strict=True)):
            delta.offsets.append(self._length + len(delta.text))
            delta.tokens.append(token)
            delta.logprobs.append(logprob)
            self._tokens.append(token)
            if piece.finish == "stop" and i == last:
                break  # this token ended the answer, and is not part of its text
            text, ends = self._stop.add(self._decoder.add(token), len(self._tokens))
            delta.text += self._turn.add(text)
            if ends:
                self._end(delta, "stop", "")
                return delta
        if piece.finish is not None:
            self._end(delta, piece.finish, self._stop.finish() + self._decoder.finish())
        self._length += len(delta.text)
        return delta

    def _end(self, delta: Delta, finish: str, rest: str) -> None:
        """End the sample. `rest`: text that was held back."""
        delta.text += self._turn.add(rest)
        text, calls = self._turn.finish(cut=finish == "length")
        delta.text += text
        delta.calls = [self._describe(i, call) for i, call in enumerate(calls)]
        delta.finish = "tool_calls" if calls else finish
        self.finished = True

    def _describe(self, number: int, call: ToolCall) -> dict[str, Any]:
        """Describe a call in OpenAI's form.

        Its id has nine letters and digits, which some templates require. It follows from prompt and answer, because
        it may become part of the next prompt, and equal conversations should have equal prompts.
        """
        said = b"".join((array("q", self._prompt).tobytes(), self._tokens.tobytes(), bytes([number % 256])))
        function = {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}
        return {"id": hashlib.sha256(said).hexdigest()[:9], "type": "function", "function": function}
