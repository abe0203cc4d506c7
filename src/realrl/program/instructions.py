"""The instructions a program is made of. Each names every rank that takes part, so that it reads alone."""

from dataclasses import dataclass
from typing import Literal

from realrl.plan.placement import Placement


@dataclass(frozen=True)
class Feed:
    """Take this step's records from the data set: their keys become known here, lengths and values."""

    keys: tuple[str, ...]


What = Literal["parameters", "optimizer"]
"""What of a role may be kept in host memory: its parameters, or all else that its training needs."""


@dataclass(frozen=True)
class Reallocate:
    """Turn a role's parameters from the layout of `source` into that of `target`, on the ranks of both.

    With a `mix`, those of the role `into`, which are in the layout of `target` already, become
    (1 - mix) * theirs + mix * what comes.
    """

    role: str
    source: Placement
    target: Placement
    into: str | None = None
    mix: float | None = None

    def __post_init__(self) -> None:
        if (self.into is None) != (self.mix is None):
            raise ValueError("a reallocation has both a role to mix into and a factor, or neither")


@dataclass(frozen=True)
class Release:
    """Free the copy of a role's parameters that was reallocated into the layout of `placement`."""

    role: str
    placement: Placement


@dataclass(frozen=True)
class Offload:
    """Move what a role has on these ranks into host memory."""

    role: str
    placement: Placement
    what: What


@dataclass(frozen=True)
class Load:
    """The reverse of `Offload`."""

    role: str
    placement: Placement
    what: What


@dataclass(frozen=True)
class Run:
    """Execute a call on the ranks of its placement.

    A function, which has no role, is only started: its rank goes on, and waits where its outputs or metrics are
    needed, at `ShareLengths`, `Send` or `Report`, and at the end of the step.
    """

    call: str
    role: str | None
    placement: Placement


@dataclass(frozen=True)
class ShareLengths:
    """Tell `readers` the row lengths of a key that `call` just produced on its `heads`.

    The heads report to the first of them, which tells everyone.
    """

    key: str
    call: str
    heads: tuple[int, ...]
    readers: tuple[int, ...]


@dataclass(frozen=True)
class Send:
    """Send the rows of keys that `producer` left here to those ranks of `consumer` that work on them.

    Does not wait for the receivers.
    """

    number: int
    """Tells the exchanges of a program apart; the same on both sides."""
    keys: tuple[str, ...]
    producer: str
    consumer: str
    receivers: tuple[int, ...]


@dataclass(frozen=True)
class Receive:
    """The other side of `Send`: waits for the rows that `consumer` works on here."""

    number: int
    keys: tuple[str, ...]
    producer: str
    consumer: str
    senders: tuple[int, ...]


@dataclass(frozen=True)
class Report:
    """Bring the figures of a call from the ranks that have them to another, which adds them up and writes them.

    Of a model it is one rank, since its ranks have added them up; every rank of a function has those of its items.
    """

    call: str
    senders: tuple[int, ...]
    receiver: int


Instruction = Feed | Reallocate | Release | Offload | Load | Run | ShareLengths | Send | Receive | Report


@dataclass(frozen=True)
class Program:
    """What one rank executes in a step, in order."""

    rank: int
    instructions: tuple[Instruction, ...]
