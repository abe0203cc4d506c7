"""Calls of models and functions, and the keys that flow between them."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from realrl.config.errors import DescriptionError


class Kind(StrEnum):
    """Kind of work that a call does: with its role's model, or, of a function, without one."""

    GENERATE = "generate"
    INFERENCE = "inference"
    TRAIN = "train"
    FUNCTION = "function"


_BYTES = {"int64": 8, "int32": 4, "int16": 2, "float32": 4, "float64": 8}

ROUTED_EXPERTS = "routed_experts"
"""Key in which a generate call gives the experts that its model chose, without the call's prefix."""


@dataclass(frozen=True)
class Key:
    """A named value of every item of a batch: a row of numbers, possibly of different length per item.

    `length` is `"own"` (rows have lengths of their own, which ranks must be told), `"one"` (one number per
    item), or the name of another key with rows of the same lengths. With a `width` there are that many numbers at
    each position of a row, else one.
    """

    name: str
    dtype: Literal["int64", "int32", "int16", "float32", "float64"]
    length: str = "own"
    width: int | None = None

    @property
    def position_bytes(self) -> int:
        """Bytes of one position of a row."""
        return _BYTES[self.dtype] * (self.width or 1)


@dataclass(frozen=True)
class Candidates:
    """Tokens that a model gives log-probabilities of at each position, besides the token that stands there.

    `ids` is the key that names them, `count` at each position; None for the `count` likeliest ones. `setting` is
    what in the recipe says how many, for error messages.
    """

    count: int
    ids: str | None = None
    setting: str = "count"


@dataclass(frozen=True)
class Replay:
    """Experts that a call's model takes over from the one that sampled (router replay).

    `sequences` and `experts` are keys of one generate call: at each position the experts of every layer, -1 where
    none were chosen.
    """

    sequences: str
    experts: str


@dataclass(frozen=True)
class MovingAverage:
    """EMA of a trained role: after training of `source` in every `period`-th step, `role` is updated.

    Its parameters become (1 - factor) * theirs + factor * those of `source`; with a factor of 1, those of `source`.
    """

    role: str
    source: str
    factor: float
    same_start: bool = False
    """Whether both start from the same values, so that what training leaves alone stays equal by itself."""
    period: int = 1

    def __post_init__(self) -> None:
        if self.period < 1:
            raise DescriptionError(
                f"{self.role} follows {self.source} every {self.period} steps, not 1 or more"
            )


@dataclass(frozen=True)
class Call:
    """One call of a training step: of a role's model, or of a function on the host.

    `work` names the input keys whose row lengths, added up, are the tokens an item costs; batches are
    balanced by it. `minibatches` > 1 splits the items of a step, in order, into that many optimizer steps.

    A function (a reward, a verifier, a tool) has no role: `function` is its reference, for example
    `reward.py:score`, by which its measured seconds are known. With `record_fields` it sees those fields of its
    items' records that no key is made of.

    A generate call has the keys `sequences`, `logprobs`, `prompt_length` and `finished` to offer, with `prefix` in
    front of each: so that a graph can have two of them.

    With `candidates`, a language model gives log-probabilities of further tokens at each position of its one row
    per item, the `work` of the call.

    With `replays`, a mixture of experts chooses those that the sampler chose, wherever a row of the i-th key of
    `work` repeats the sequence of the i-th of them; `dataflow.replay` sets them.
    """

    name: str
    role: str | None
    kind: Kind
    inputs: tuple[str, ...]
    outputs: tuple[str, ...] = ()
    work: tuple[str, ...] = ()
    minibatches: int = 1
    function: str | None = None
    record_fields: bool = False
    prefix: str = ""
    candidates: Candidates | None = None
    replays: tuple[Replay | None, ...] = ()

    def __post_init__(self) -> None:
        if (self.role is None) != (self.kind is Kind.FUNCTION):
            raise DescriptionError(f"call {self.name}: a function has no role, every other call has one")
        if (self.function is not None) != (self.kind is Kind.FUNCTION):
            raise DescriptionError(f"call {self.name}: a function has a reference, no other call has one")
        if self.record_fields and self.kind is not Kind.FUNCTION:
            raise DescriptionError(f"call {self.name}: only functions see the fields of records")
        if self.prefix and self.kind is not Kind.GENERATE:
            raise DescriptionError(f"call {self.name}: only generation has a prefix for its keys")
        if not self.work or not set(self.work) <= set(self.inputs):
            raise DescriptionError(
                f"call {self.name}: work={self.work} must name some of its inputs {self.inputs}"
            )
        if self.minibatches > 1 and self.kind is not Kind.TRAIN:
            raise DescriptionError(f"call {self.name}: only training has mini-batches")
        if self.candidates is not None:
            self._check_candidates(self.candidates)

    def _check_candidates(self, candidates: Candidates) -> None:
        if self.kind not in (Kind.INFERENCE, Kind.TRAIN) or len(self.work) > 1:
            raise DescriptionError(
                f"call {self.name}: only inference and training have candidates, and one key as work"
            )
        if candidates.count < 1:
            raise DescriptionError(f"call {self.name}: {candidates.count} candidates are less than one")
        if candidates.ids is None and self.kind is Kind.TRAIN:
            raise DescriptionError(f"call {self.name}: training needs a key with the ids of its candidates")
        if candidates.ids is not None and candidates.ids not in self.inputs:
            raise DescriptionError(
                f"call {self.name}: candidates are {candidates.ids!r}, none of its inputs {self.inputs}"
            )

    @property
    def records_experts(self) -> bool:
        """Whether a generate call gives the experts that its model chose."""
        return self.kind is Kind.GENERATE and f"{self.prefix}{ROUTED_EXPERTS}" in self.outputs

    @property
    def is_function(self) -> bool:
        """Whether it runs on the host, without a model."""
        return self.kind is Kind.FUNCTION

    @property
    def model_role(self) -> str:
        """The role whose model it uses; no call of a function must be asked for it."""
        assert self.role is not None, f"{self.name} is a function, which has no model"
        return self.role
