"""Calls of models and functions, and the keys that pass between them."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from realrl.config.errors import DescriptionError


class Kind(StrEnum):
    """What a call does: it generates, infers or trains with its role's model, or it runs a function without a
    model."""

    GENERATE = "generate"
    INFERENCE = "inference"
    TRAIN = "train"
    FUNCTION = "function"


_BYTES = {"int64": 8, "int32": 4, "int16": 2, "float32": 4, "float64": 8}

ROUTED_EXPERTS = "routed_experts"
"""Name of the key that holds the experts that a generate call's model chose. The call's prefix goes in front of
it."""


@dataclass(frozen=True)
class Key:
    """A named value that every item of a batch has: a row of numbers.

    `length` is `"own"` if each row has a length of its own, which ranks learn only when the row is produced. It is
    `"one"` if each row is a single number. Otherwise it names another key whose rows have the same lengths. `width`
    is the count of numbers at each position of a row; None means one.
    """

    name: str
    dtype: Literal["int64", "int32", "int16", "float32", "float64"]
    length: str = "own"
    width: int | None = None

    @property
    def position_bytes(self) -> int:
        return _BYTES[self.dtype] * (self.width or 1)


@dataclass(frozen=True)
class Candidates:
    """Tokens whose log-probabilities a model returns at each position, in addition to the actual token at that
    position.

    `ids` is the key that holds the ids of these tokens, `count` at each position. If it is None, the model returns
    the `count` likeliest tokens. `setting` is the recipe setting that error messages name for `count`.
    """

    count: int
    ids: str | None = None
    setting: str = "count"


def can_share_prompts(candidates: Candidates | None) -> bool:
    """Decide whether an inference or train call computes the common beginning of several sequences only once.

    `candidates`: those of the call. Given candidates may differ at equal tokens.
    """
    return candidates is None or candidates.ids is None


@dataclass(frozen=True)
class Replay:
    """Router replay: the model of a call uses the experts that the sampling model chose.

    `sequences` and `experts` are keys of one generate call. `experts` holds the experts of every layer at each
    position, or -1 if the model chose none there.
    """

    sequences: str
    experts: str


@dataclass(frozen=True)
class MovingAverage:
    """EMA of a trained role: `role` is updated after `source` is trained, in every `period`-th step. Its parameters
    become (1 - factor) * old + factor * source; a factor of 1 copies `source`."""

    role: str
    source: str
    factor: float
    same_start: bool = False
    """Whether both roles start from the same values. Parameters that training never changes then stay equal without
    an update."""
    period: int = 1

    def __post_init__(self) -> None:
        if self.period < 1:
            raise DescriptionError(
                f"{self.role} follows {self.source} every {self.period} steps; it must be 1 or more"
            )


@dataclass(frozen=True)
class Call:
    """One call of a training step. It runs a role's model, or a function on the host.

    `work` names the input keys that determine an item's cost: the total length, in tokens, of the item's rows of
    these keys. Batches are balanced by this cost. With `minibatches` > 1, the items of a step are split, in order,
    into that number of optimizer steps.

    A function (a reward, a verifier, a tool) has no role. Its `function` is a reference such as `reward.py:score`,
    which also identifies the function's measured seconds. With `record_fields`, the function, or the environment of
    a generate call, also receives those fields of its items' records that are not keys.

    A generate call can output `sequences`, `logprobs`, `prompt_length` and `finished`, each with `prefix` in
    front. The prefix lets a graph have two generate calls. `dataflow.environment` adds the outputs of an
    environment.

    With `candidates`, a language model returns the log-probabilities of more tokens at each position. The call
    then has one key in `work`.

    `replays` has an entry for each key of `work`; `dataflow.replay` sets the entries. If a row repeats the sampled
    sequence that its entry names, a mixture of experts uses the experts chosen during sampling.

    `ahead` is the number of steps by which the call runs ahead of training: in the step that trains on batch t, the
    call works on batch t + `ahead`. A key has a lag between two calls if the first one runs further ahead.

    A generate call may spread each batch over `span` steps, with a part of the answers' tokens in each of them. It
    then works on `span` batches at a time: it ends batch t + `ahead`, and begins batch t + `ahead` + `span` - 1.

    A generate call may hand on its batch in `portions`, in the order in which answers end. The calls after it work
    on a portion as soon as it exists. Training adds up the gradients of all portions before its optimizer step. A
    train call that `accumulates` only adds its gradients to those of earlier calls, and changes no parameters.
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
    ahead: int = 0
    span: int = 1
    portions: int = 1
    accumulates: bool = False

    def __post_init__(self) -> None:
        if self.ahead < 0 or (self.ahead and self.kind is Kind.TRAIN):
            raise DescriptionError(
                f"call {self.name}: ahead={self.ahead}; it must be 0 or more, and 0 for training"
            )
        if self.span < 1 or (self.span > 1 and self.kind is not Kind.GENERATE):
            raise DescriptionError(
                f"call {self.name}: span={self.span}; it must be 1 or more, and 1 unless the call generates"
            )
        streams = self.kind is Kind.GENERATE and not self.begins_ahead
        if self.portions < 1 or (self.portions > 1 and not streams):
            raise DescriptionError(
                f"call {self.name}: portions={self.portions}; it must be 1 or more, and 1 unless the call generates"
                " the batch of the present step"
            )
        if (self.role is None) != (self.kind is Kind.FUNCTION):
            raise DescriptionError(f"call {self.name}: a function has no role, every other call has one")
        if (self.function is not None) != (self.kind is Kind.FUNCTION):
            raise DescriptionError(f"call {self.name}: a function has a reference, no other call has one")
        if self.record_fields and self.kind not in (Kind.FUNCTION, Kind.GENERATE):
            raise DescriptionError(
                f"call {self.name}: only functions and environments of generation see the fields of records"
            )
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
            raise DescriptionError(f"call {self.name}: {candidates.count} candidates; it needs at least one")
        if candidates.ids is None and self.kind is Kind.TRAIN:
            raise DescriptionError(f"call {self.name}: training needs a key with the ids of its candidates")
        if candidates.ids is not None and candidates.ids not in self.inputs:
            raise DescriptionError(
                f"call {self.name}: candidates are {candidates.ids!r}, which is not among its inputs {self.inputs}"
            )

    @property
    def begins_ahead(self) -> int:
        """Number of steps by which the call begins a batch before training."""
        return self.ahead + self.span - 1

    def count_part(self, new_tokens: int) -> int:
        """Compute the maximum number of tokens that an answer gets in one step, if it may have `new_tokens`."""
        return -(-new_tokens // self.span)

    @property
    def records_experts(self) -> bool:
        """Whether a generate call outputs the experts that its model chose."""
        return self.kind is Kind.GENERATE and f"{self.prefix}{ROUTED_EXPERTS}" in self.outputs

    @property
    def has_metrics(self) -> bool:
        """Whether the call reports metrics. Generation does so only about its environment."""
        return self.kind is not Kind.GENERATE or self.record_fields

    @property
    def updates(self) -> bool:
        """Whether the call changes the parameters of its role."""
        return self.kind is Kind.TRAIN and not self.accumulates

    @property
    def is_function(self) -> bool:
        """Whether the call runs on the host, without a model."""
        return self.kind is Kind.FUNCTION

    @property
    def model_role(self) -> str:
        """The role whose model the call uses; functions have none."""
        assert self.role is not None, f"{self.name} is a function, which has no model"
        return self.role
