"""Model function calls and the keys that flow between them."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal


class Kind(StrEnum):
    """Kind of work that a call does with its role's model."""

    GENERATE = "generate"
    INFERENCE = "inference"
    TRAIN = "train"


@dataclass(frozen=True)
class Key:
    """A named value of every item of a batch: a row of numbers, possibly of different length per item.

    `length` is `"own"` (rows have lengths of their own, which ranks must be told), `"one"` (one number per
    item), or the name of another key with rows of the same lengths.
    """

    name: str
    dtype: Literal["int64", "float32"]
    length: str = "own"


@dataclass(frozen=True)
class Average:
    """EMA of a trained role: after each training of `source`, `role` is updated.

    Its parameters become (1 - factor) * theirs + factor * those of `source`.
    """

    role: str
    source: str
    factor: float
    same_start: bool = False
    """Whether both start from the same values, so that what training leaves alone stays equal by itself."""


@dataclass(frozen=True)
class Call:
    """One model function call of a training step.

    `work` names the input keys whose row lengths, added up, are the tokens an item costs; batches are
    balanced by it. `minibatches` > 1 splits the items of a step, in order, into that many optimizer steps.
    """

    name: str
    role: str
    kind: Kind
    inputs: tuple[str, ...]
    outputs: tuple[str, ...] = ()
    work: tuple[str, ...] = ()
    minibatches: int = 1

    def __post_init__(self) -> None:
        if not self.work or not set(self.work) <= set(self.inputs):
            raise ValueError(f"call {self.name}: work={self.work} must name some of its inputs {self.inputs}")
        if self.minibatches > 1 and self.kind is not Kind.TRAIN:
            raise ValueError(f"call {self.name}: only training has mini-batches")
