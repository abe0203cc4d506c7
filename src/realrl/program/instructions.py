"""Instructions of programs. Each instruction names all ranks that execute it together, so that it can be read on
its own."""

from dataclasses import dataclass
from typing import Literal

from realrl.layout.sets import BASE
from realrl.plan.placement import Placement


@dataclass(frozen=True)
class Feed:
    """Take this step's records from the data set. Every rank then knows the values and lengths of these keys."""

    keys: tuple[str, ...]


StateKind = Literal["parameters", "optimizer"]
"""What can be offloaded of a parameter set: its parameters, or its gradients and optimizer state."""


@dataclass(frozen=True)
class Reallocate:
    """Reallocate a role's parameter set from the layout of `source` to the layout of `target`, on the ranks of
    both.

    With `mix`, the instruction is an EMA update of the role `into`, whose set is already in the layout of `target`.
    The set becomes (1 - mix) * old + mix * received.
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
    """Free the copy of a role's parameter set that an earlier `Reallocate` made in the layout of `placement`."""

    role: str
    placement: Placement
    parameter_set: str = BASE


@dataclass(frozen=True)
class Offload:
    """Move one kind of state of a role's parameter set into host memory."""

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

    A function, which has no role, is only started. Its rank continues. It waits for the result at the next
    `ShareLengths`, `Send` or `Report` that needs the result, or else at the end of the step.
    """

    call: str
    role: str | None
    placement: Placement
    portion: int = 0
    """Number of the portion that the call works on, counted from 1; 0 if it works on the whole batch. See
    `Call.portions`. The same holds for the instructions below."""


@dataclass(frozen=True)
class ShareLengths:
    """Broadcast to `readers` the row lengths of a key that `call` just produced. All `output_ranks` send their
    lengths to the first of them, which broadcasts them."""

    key: str
    call: str
    output_ranks: tuple[int, ...]
    readers: tuple[int, ...]
    portion: int = 0


@dataclass(frozen=True)
class Send:
    """Send rows that `producer` left on this rank to the ranks of `consumer` that need them. Does not wait for the
    receivers."""

    number: int
    """Identifier of the exchange, the same in its `Send` and its `Receive`."""
    keys: tuple[str, ...]
    producer: str
    consumer: str
    receivers: tuple[int, ...]
    portion: int = 0


@dataclass(frozen=True)
class Receive:
    """Receive the rows that `consumer` needs on this rank; waits for the matching `Send`."""

    number: int
    keys: tuple[str, ...]
    producer: str
    consumer: str
    senders: tuple[int, ...]
    portion: int = 0


@dataclass(frozen=True)
class Report:
    """Send the metrics of a call to the rank that adds them up and writes them.

    The ranks of a model have already summed their metrics, so one of them sends. Each rank of a function has only
    the metrics of its own items, so all of them send.
    """

    call: str
    senders: tuple[int, ...]
    receiver: int


Instruction = Feed | Reallocate | Release | Offload | Load | Run | ShareLengths | Send | Receive | Report

OfPortion = Run | ShareLengths | Send | Receive
"""Instructions that may work on a portion of the batch."""


@dataclass(frozen=True)
class Program:
    """Instructions that one rank executes in a step, in order."""

    rank: int
    instructions: tuple[Instruction, ...]
