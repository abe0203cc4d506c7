"""What the server asks of an engine: continue prompts, token by token."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol


@dataclass(frozen=True)
class SamplingOptions:
    """How one request is continued."""

    max_tokens: int
    temperature: float = 1.0
    """0 for the likeliest token."""
    top_p: float = 1.0
    top_k: int = 0
    """0 for all tokens."""
    min_tokens: int = 0
    ignore_eos: bool = False
    seed: int | None = None
    """None for a new one."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the continuation, beside the model's own."""


@dataclass(frozen=True)
class Piece:
    """Newly sampled tokens of a request."""

    tokens: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    """Log-probabilities of the tokens, at temperature 1 and over the whole vocabulary."""
    cached_tokens: int = 0
    """Number of tokens of the prompt whose keys and values were in the cache."""
    finish: Literal["stop", "length"] | None = None
    error: str | None = None
    """Why the request ends without a result."""


class EngineClosedError(Exception):
    """The engine takes no more requests; the message says why."""


class Engine(Protocol):
    """Engine that continues many prompts at a time."""

    name: str
    """Name of the model."""
    context_tokens: int
    """Maximum length of a prompt with its continuation."""
    vocab_size: int

    def submit(
        self, prompt: Sequence[int], options: SamplingOptions, receive: Callable[[Piece], None]
    ) -> int:
        """Continue a prompt. `receive` is called from the engine's thread. Returns the number of the request."""

    def cancel(self, request: int) -> None:
        """End a request. Nothing happens if it has ended."""

    def close(self) -> None:
        """End all requests, and free the model."""
