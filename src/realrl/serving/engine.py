"""Interface between the endpoint and the engine that samples. Does not import torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How one request is sampled. All values are checked, and prompt and answer fit into the context."""

    max_tokens: int
    """Maximum tokens of the answer, at least 1."""
    temperature: float = 1.0
    """Number that logits are divided by, at least 0.01; 0 takes the most likely token."""
    top_p: float = 1.0
    """Sample among the most likely tokens whose probabilities add up to this number; above 0, at most 1."""
    top_k: int = 0
    """Sample among the k most likely tokens; 0 for all."""
    min_tokens: int = 0
    """Minimum tokens of the answer, at most `max_tokens`. Before this number is reached, no token ends it."""
    ignore_eos: bool = False
    """Whether the model's own end-of-sequence tokens do not end the answer."""
    seed: int | None = None
    """Seed of this request's random numbers, at least 0 and below 2^63; None for any seed."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the answer, in addition to the model's own. They end it with `ignore_eos`, too."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Newly sampled tokens of one request."""

    tokens: Sequence[int] = ()
    """New tokens. If `finish` is `stop`, the last one is the token that ended the answer."""
    logprobs: Sequence[float] = ()
    """Log-probability of each new token, finite."""
    cached_tokens: int = 0
    """Prompt tokens whose keys and values came from a cache; known with the first piece."""
    finish: Literal["stop", "length"] | None = None
    """Why the answer ended; None if it continues."""
    error: str | None = None
    """Why the request failed. Such a piece is the last one."""


class EngineClosedError(Exception):
    """The engine takes no more requests; the message says why."""


class Engine(Protocol):
    """Samples answers to prompts of tokens. All methods may be called from any thread.

    Every request ends with a piece that has `finish` or `error`, unless it is cancelled. An engine that can no
    longer sample ends all of its requests with an `error`, and `submit` then raises EngineClosedError.
    """

    name: str
    """Name of the model in requests and answers."""
    context_tokens: int
    """Maximum tokens of prompt and answer together."""
    context_setting: str
    """Setting that limits `context_tokens`, for messages; empty if it is the model's own limit."""
    vocab_size: int
    """Number of tokens in the model's vocabulary; valid ids are smaller."""

    @property
    def problem(self) -> str | None:
        """Why the engine takes no more requests; None if it works."""

    def submit(
        self, prompt: Sequence[int], options: SamplingOptions, receive: Callable[[Piece], None]
    ) -> int:
        """Queue a request, and return its number.

        `receive` gets the pieces in order, on a thread of the engine, perhaps before this method returns.
        """

    def cancel(self, request: int) -> None:
        """End a request and free its memory at once. A request that has already ended is left alone."""

    def close(self) -> None:
        """End all requests, and stop the engine's threads. A second call does nothing."""
