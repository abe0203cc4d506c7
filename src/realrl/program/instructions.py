"""Instructions of programs. Each names every rank that takes part, so that it can be read alone."""

from dataclasses import dataclass
from typing import Literal

from realrl.layout.sets import BASE
from realrl.plan.placement import Placement


@dataclass(frozen=True)
class Feed:
    """Take this step's records from the data set: their keys become known here, lengths and values."""

    keys: tuple[str, ...]


StateKind = Literal["parameters", "optimizer"]
"""State kinds of a parameter set that may be offloaded: the parameters, or all else that its training needs."""


@dataclass(frozen=True)
class Reallocate:
    """Turn a parameter set of a role from the layout of `source` into that of `target`, on the ranks of both.

    With a `mix`, this is an EMA update: that set of the role `into`, which is in the layout of `target` already,
    becomes (1 - mix) * old + mix * received.
    """

    role: str
    source: Placement
    target: Placement
    into: str | None = None
    mix: float | None = None
    parameter_set: str = BASE

    def __post_init__(self) -> None:
        if (self.into is None) != (self.mix is None):
            raise ValueError("a reallocation has both a role to mix into and a factor, or neither")


@dataclass(frozen=True)
class Release:
    """Free the copy of a role's parameter set that was reallocated into the layout of `placement`."""

    role: str
    placement: Placement
    parameter_set: str = BASE


@dataclass(frozen=True)
class Offload:
    """Move one kind of state of a role's parameter set on these ranks into host memory."""

    role: str
    placement: Placement
    state: StateKind
    parameter_set: str = BASE


@dataclass(frozen=True)
class Load:
    """Move offloaded state of a role back into device memory."""

    role: str
    placement: Placement
    state: StateKind
    parameter_set: str = BASE


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
    """Broadcast the row lengths of a key, which `call` just produced on its `output_ranks`, to `readers`.

    The output ranks send theirs to the first of them, which broadcasts all.
    """

    key: str
    call: str
    output_ranks: tuple[int, ...]
    readers: tuple[int, ...]


@dataclass(frozen=True)
class Send:
    """Send the rows of keys that `producer` left here to the ranks of `consumer` that work on them.

    Does not wait for the receivers.
    """

    number: int
    """Identifier of the exchange within a program; equal in its `Send` and its `Receive`."""
    keys: tuple[str, ...]
    producer: str
    consumer: str
    receivers: tuple[int, ...]


@dataclass(frozen=True)
class Receive:
    """Receive the rows that `consumer` works on here; waits for the matching `Send`."""

    number: int
    keys: tuple[str, ...]
    producer: str
    consumer: str
    senders: tuple[int, ...]


@dataclass(frozen=True)
class Report:
    """Send the metrics of a call from the ranks that have them to the rank that adds them up and writes them.

    Of a model it is one rank, since its ranks have added them up; every rank of a function has those of its items.
    """

    call: str
    senders: tuple[int, ...]
    receiver: int


Instruction = Feed | Reallocate | Release | Offload | Load | Run | ShareLengths | Send | Receive | Report


@dataclass(frozen=True)
class Program:
    """Instructions that one rank executes in a step, in order."""

    rank: int
    instructions: tuple[Instruction, ...]
