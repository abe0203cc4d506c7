"""One sample of a request, from the engine's pieces to news for the client. Does not import torch."""

import json
import uuid
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
        *,
        stop: Sequence[str],
        min_tokens: int,
        continues: Sequence[int] = (),
        form: str | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        keep_special: bool = False,
    ) -> None:
        """`continues`: tokens of a prompt whose text the sample continues. The others are as in `TurnReader`."""
        self._turn = TurnReader(form, tools)
        keep_special = keep_special or self._turn.reads_special
        self._decoder = TextDecoder(texts, prompt=continues, keep_special=keep_special)
        self._stop = StopFinder(stop, min_tokens)
        self._count = self._length = 0
        self.cached_tokens = 0
        """Prompt tokens that came from a cache."""
        self.finished = False
        """Whether the sample is complete."""

    def read(self, piece: Piece) -> Delta:
        """Read a piece. After a stop string, the other tokens of the piece are dropped."""
        if not self._count:
            self.cached_tokens = piece.cached_tokens
        delta = Delta()
        last = len(piece.tokens) - 1
        for i, (token, logprob) in enumerate(zip(piece.tokens, piece.logprobs, strict=True)):
            delta.offsets.append(self._length + len(delta.text))
            delta.tokens.append(token)
            delta.logprobs.append(logprob)
            self._count += 1
            if piece.finish == "stop" and i == last:
                break  # this token ended the answer, and is not part of its text
            text, ends = self._stop.add(self._decoder.add(token), self._count)
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
        delta.calls = [_describe(call) for call in calls]
        delta.finish = "tool_calls" if calls else finish
        self.finished = True


def _describe(call: ToolCall) -> dict[str, Any]:
    """Describe a call in OpenAI's form. Its id has nine letters and digits, which some templates require."""
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    function = {"name": call.name, "arguments": arguments}
    return {"id": uuid.uuid4().hex[:9], "type": "function", "function": function}
