"""Requests that a generate call serves: each is a turn of one of the call's rows.

A row keeps what it has computed until another request takes it. So a request that continues an earlier conversation
takes the row of that conversation, and only new tokens are prefilled.
"""

import math
import queue
import secrets
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch

from realrl.engine.generation.sampling_noise import SamplingNoise, SamplingSeed
from realrl.engine.generation.scheduler import DecodeRow, TokenChoice
from realrl.engine.generation.turns import TurnReply, take_all
from realrl.serving.engine import EngineClosedError, Piece, SamplingOptions

_SAME_CONVERSATION = 0.5
"""A request continues the conversation of a row if it shares at least this part of the row's tokens."""


@dataclass(eq=False)
class _Request:
    number: int
    prompt: Sequence[int]
    options: SamplingOptions
    receive: Callable[[Piece], None]
    ends: frozenset[int]
    """Tokens that end the continuation."""
    cached: int = 0
    tokens: list[int] = field(default_factory=list)
    """Sampled tokens that have not been sent yet."""
    logprobs: list[float] = field(default_factory=list)
    finish: Literal["stop", "length"] | None = None
    error: str | None = None
    cancelled: bool = False

    def send(self) -> None:
        """Send what is new."""
        if self.cancelled or not (self.tokens or self.finish or self.error):
            return
        piece = Piece(
            tokens=tuple(self.tokens),
            logprobs=tuple(self.logprobs),
            cached_tokens=self.cached,
            finish=self.finish,
            error=self.error,
        )
        self.tokens.clear()
        self.logprobs.clear()
        self.receive(piece)


class Requests:
    """Requests on the rows of a generate call; see `engine.generation.turns.Turns`.

    Any thread may call `submit`, `cancel` and `close`. All other methods belong to the thread that generates.
    """

    def __init__(self, rows: Sequence[DecodeRow], stop_token_ids: Sequence[int]) -> None:
        """`stop_token_ids` are the tokens with which the model ends its answers."""
        self._rows = rows
        self._stop_token_ids = frozenset(stop_token_ids)
        self._idle: dict[int, None] = dict.fromkeys(row.number for row in rows)
        """Rows without a request, in the order in which they became idle."""
        self._running: dict[int, _Request] = {}
        """Requests by their rows."""
        self._arrived: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        """None wakes the thread that generates."""
        self._queue: deque[_Request] = deque()
        """Requests that wait for a row."""
        self._lock = threading.Lock()
        self._open: dict[int, _Request] = {}
        """Requests that have not ended."""
        self._last = 0
        """Number of the last request."""
        self._closed: str | None = None
        """Why no more requests are taken."""

    @property
    def problem(self) -> str | None:
        """See `Engine.problem`."""
        return self._closed

    def submit(
        self, prompt: Sequence[int], options: SamplingOptions, receive: Callable[[Piece], None]
    ) -> int:
        """See `Engine.submit`. Raises EngineClosedError if no more requests are taken."""
        ends = frozenset(options.stop_token_ids)
        if not options.ignore_eos:
            ends |= self._stop_token_ids
        with self._lock:
            if self._closed is not None:
                raise EngineClosedError(self._closed)
            self._last += 1
            request = _Request(self._last, prompt, options, receive, ends)
            self._open[request.number] = request
        self._arrived.put(request)
        return request.number

    def cancel(self, number: int) -> None:
        """See `Engine.cancel`."""
        with self._lock:
            request = self._open.pop(number, None)
        if request is not None:
            request.cancelled = True
            self._arrived.put(None)

    def close(self, reason: str) -> None:
        """Take no more requests. Those that have not ended end with this reason."""
        with self._lock:
            self._closed = self._closed or reason
        self._arrived.put(None)

    def fail_all(self) -> None:
        """End all requests after `close`, when nothing generates any more."""
        with self._lock:
            left = list(self._open.values())
            self._open.clear()
        for request in left:
            request.error = self._closed
            request.send()

    def note(self, row: int, count: int, token: int, logprob: float) -> bool:
        request = self._running[row]
        if request.cancelled or self._closed is not None:
            return True
        if not math.isfinite(logprob):
            request.error = "the model's logits are not finite"
            return True
        request.tokens.append(token)
        request.logprobs.append(logprob)
        if token in request.ends and count >= request.options.min_tokens:
            request.finish = "stop"
        elif count == request.options.max_tokens:
            request.finish = "length"
        return request.finish is not None

    def end(self, row: int, tokens: Sequence[int]) -> None:
        """Send the end of a request, whose row becomes idle."""
        request = self._running.pop(row)
        self._idle[row] = None
        if self._closed is not None:
            return
        with self._lock:
            self._open.pop(request.number, None)
        if request.error is None and request.finish is None:
            request.finish = "length"  # the context is full
        request.send()

    def collect(self, seconds: float) -> list[TurnReply]:
        """Send the tokens of the last steps, and give waiting requests to idle rows."""
        for request in self._running.values():
            request.send()
        arrived = take_all(self._arrived, 0.0 if self._queue else seconds)
        self._queue.extend(request for request in arrived if request is not None)
        if self._closed is not None:
            done = [TurnReply(row, done=True) for row in self._idle]
            self._idle.clear()
            return done
        replies = []
        while self._queue and self._idle:
            request = self._queue.popleft()
            if not request.cancelled:
                replies.append(self._begin(request))
        return replies

    def _begin(self, request: _Request) -> TurnReply:
        """Give a request to an idle row."""
        prompt = np.asarray(request.prompt, dtype=np.int64)
        row, shared = self._choose_row(prompt)
        del self._idle[row.number]
        self._running[row.number] = request
        # The first token is the row's prompt, and all others are its continuation.
        kept = max(0, shared - 1)
        request.cached = min(kept, row.cached)
        options = request.options
        row.key = _make_key(options.seed)
        first_end = len(prompt) - 1 + options.min_tokens
        row.choice = TokenChoice(options.temperature, options.top_k, options.top_p, first_end)
        # A row that shares nothing begins with another token.
        first = None if shared else int(prompt[0])
        return TurnReply(row.number, request.prompt[kept + 1 :], kept=kept, first=first)

    def _choose_row(self, prompt: np.ndarray) -> tuple[DecodeRow, int]:
        """Choose the idle row whose conversation a prompt continues, or else the one that has been idle longest.

        Returns the row, and how many tokens it shares with the prompt.
        """
        first = self._rows[next(iter(self._idle))]
        best, most = first, _count_shared(first, prompt)
        for number in self._idle:
            row = self._rows[number]
            shared = _count_shared(row, prompt)
            if shared > most and shared >= _SAME_CONVERSATION * (1 + len(row.tokens)):
                best, most = row, shared
        return best, most


def _count_shared(row: DecodeRow, prompt: np.ndarray) -> int:
    """Count the first tokens that are equal in a row and a prompt."""
    if row.prompt.tokens[0] != prompt[0]:
        return 0
    count = min(len(row.tokens), len(prompt) - 1)
    if not count:
        return 1
    differ = np.frombuffer(row.tokens, dtype=np.int64)[:count] != prompt[1 : count + 1]
    return 1 + (int(differ.argmax()) if differ.any() else count)


def _make_key(seed: int | None) -> int:
    """Make the key of a request's sampling noise."""
    noise = SamplingNoise(SamplingSeed(secrets.randbits(63) if seed is None else seed, step=0))
    return int(noise.make_keys(torch.zeros(1, dtype=torch.int64)))
