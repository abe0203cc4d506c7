"""Turns of generation with an environment: a row ends a turn, waits for the environment, and goes on."""

import queue
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np

_Item = TypeVar("_Item")
_FIELDS = 6
"""Numbers of a reply as numbers, without its tokens."""


@dataclass(frozen=True)
class TurnReply:
    """What becomes of a row that waits for the environment.

    The row gets `tokens`, which the model has not sampled, and goes on. If `done`, it is complete instead. Unless
    `kept` is None, the row first loses all but the first `kept` tokens after its prompt. If `first` is a token, it
    replaces the prompt of a row that keeps nothing and whose prompt is one token. `limit` is the maximum number of
    tokens of the next turn; None for no limit beyond those of the call.
    """

    row: int
    tokens: Sequence[int] = ()
    done: bool = False
    kept: int | None = None
    first: int | None = None
    limit: int | None = None


class Turns(Protocol):
    """The environment of a generate call, as each rank of a replica sees it.

    Every rank calls the same methods in the same order. Only one rank talks to the environment; `collect` gives all
    ranks the same replies.
    """

    def note(self, row: int, count: int, token: int, logprob: float) -> bool:
        """Note a token that was sampled as the `count`-th of its turn. Returns whether the turn ends here even if
        the token is no end."""

    def end(self, row: int, tokens: Sequence[int]) -> None:
        """End a turn of the model: its sampled tokens, with the token that ended it, if any."""

    def collect(self, seconds: float) -> Sequence[TurnReply]:
        """Return the replies that have arrived. Wait for the first one for at most `seconds`."""


def take_all(arrived: "queue.SimpleQueue[_Item]", seconds: float) -> Iterator[_Item]:
    """Yield what has arrived. Wait for the first item for at most `seconds`."""
    try:
        yield arrived.get(timeout=seconds) if seconds else arrived.get_nowait()
        while True:
            yield arrived.get_nowait()
    except queue.Empty:
        return


def encode_replies(replies: Sequence[TurnReply]) -> np.ndarray:
    """Write replies as numbers, which `decode_replies` reads. [N] int64"""
    numbers: list[int] = []
    for reply in replies:
        options = (-1 if value is None else value for value in (reply.kept, reply.first, reply.limit))
        numbers += [reply.row, reply.done, *options, len(reply.tokens), *reply.tokens]
    return np.array(numbers, dtype=np.int64)


def decode_replies(numbers: np.ndarray) -> Iterator[TurnReply]:
    """Read replies from numbers. numbers: [N] int64"""
    place, values = 0, numbers.tolist()
    while place < len(values):
        row, done, *options, count = values[place : place + _FIELDS]
        place += _FIELDS + count
        kept, first, limit = (None if value < 0 else value for value in options)
        yield TurnReply(row, values[place - count : place], bool(done), kept, first, limit)
