"""Interface between an algorithm and the engine: the algorithm has one method for each call of its graphs.

A method computes with tensors, and does not know which devices they are on.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from realrl.data.batch import Batch, Ragged
from realrl.dataflow.environment import ACTION_MASK
from realrl.dataflow.graph import DataflowGraph
from realrl.recipe.generation import GenerationConfig
from realrl.recipe.stop_strings import StopStrings

Sum = Callable[[Tensor], Tensor]
"""Function that all-reduces a tensor over the data-parallel ranks of a call."""


@dataclass(frozen=True, eq=False)
class ModelOutput:
    """Output of a model for packed sequences with T tokens in total; `lengths` has one entry per sequence.

    logprobs: [T] log p(token t | tokens before t) at the sampling temperature, and 0 at the first token of each
    sequence. entropy: [T] entropy of the same distributions, without gradient. A language-model head computes
    logprobs and entropy. values: [T] numbers from a scalar head. candidates: [T, k] int64 ids of the tokens that
    the call's `candidates` select at each position. candidate_logprobs: [T, k] log-probabilities of these tokens
    given the tokens before t, and 0 at the first token of each sequence.
    """

    lengths: tuple[int, ...]
    logprobs: Tensor | None = None
    entropy: Tensor | None = None
    values: Tensor | None = None
    candidates: Tensor | None = None
    candidate_logprobs: Tensor | None = None


@dataclass
class Metrics:
    """Weighted means and maxima, which are combined over micro-batches and ranks.

    means: name -> (sum, weight); maxima: name -> value. All are zero-dimensional tensors without gradient. Every
    data-parallel and context-parallel rank of a call must report the same names in the same order. A rank with
    nothing to add reports weight 0.
    """

    means: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    maxima: dict[str, Tensor] = field(default_factory=dict)

    def mean(self, name: str, total: Tensor, weight: Tensor | float) -> None:
        """Add values to the mean `name`: their weighted sum `total`, and the sum `weight` of their weights."""
        total = total.detach().double()
        if isinstance(weight, Tensor):
            weight = weight.to(total.device, torch.float64)
        else:  # filled on the device, because the host would wait for a copy
            weight = torch.full((), weight, dtype=torch.float64, device=total.device)
        if name in self.means:
            old_total, old_weight = self.means[name]
            total, weight = old_total + total, old_weight + weight
        self.means[name] = (total, weight)

    def max(self, name: str, value: Tensor) -> None:
        """Update the maximum `name` by `value`."""
        value = value.detach().double()
        self.maxima[name] = torch.maximum(self.maxima[name], value) if name in self.maxima else value

    def update(self, other: "Metrics") -> None:
        for name, (total, weight) in other.means.items():
            self.mean(name, total, weight)
        for name, value in other.maxima.items():
            self.max(name, value)

    def to_plain(self) -> dict[str, Any]:
        """Convert to plain numbers that JSON can hold; `from_plain` reads them."""
        means = {name: (float(total), float(weight)) for name, (total, weight) in self.means.items()}
        return {"means": means, "maxima": {name: float(value) for name, value in self.maxima.items()}}

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> "Metrics":
        metrics = cls()
        for name, (total, weight) in plain["means"].items():
            metrics.mean(name, torch.tensor(total, dtype=torch.float64), weight)
        for name, value in plain["maxima"].items():
            metrics.max(name, torch.tensor(value, dtype=torch.float64))
        return metrics

    def result(self) -> dict[str, float]:
        """Return one number per metric; a mean of weight 0 is NaN."""
        out = {name: float(total / weight) for name, (total, weight) in self.means.items()}
        return out | {name: float(value) for name, value in self.maxima.items()}


@dataclass(frozen=True)
class GenerateMethod:
    """Method of a `generate` call: the model continues the rows of the key `prompts`.

    Outputs, each with the call's prefix: sequences (prompt and answer); logprobs (aligned with sequences, 0 on the
    prompt); prompt_length; finished (1 if the answer ends with end-of-sequence or a stop string, else 0).
    """

    sampling: GenerationConfig
    eval_sampling: GenerationConfig
    """Sampling settings of evaluation steps."""
    prompts: str = "prompts"

    def sampling_of(self, *, evaluation: bool) -> GenerationConfig:
        return self.eval_sampling if evaluation else self.sampling


class InferenceMethod(Protocol):
    """Method of an `inference` call: the model runs without gradient."""

    def sequences(self, batch: Batch) -> Ragged:
        """Select the token rows that the model runs on: the same number of consecutive rows for every item."""

    def outputs(self, batch: Batch, output: ModelOutput) -> dict[str, Ragged]:
        """Compute the call's output keys, one row per item."""

    def metrics(self, batch: Batch) -> Metrics:
        """Compute metrics of a batch whose fields include the call's outputs."""


class TrainMethod(Protocol):
    """Method of a `train` call.

    The engine calls `prepare` once, then sums `loss` over the micro-batches of each mini-batch of each epoch.
    """

    epochs: int
    """Passes over the items of a step."""
    entropy: bool
    """Whether `loss` uses the entropy, which costs time to compute."""

    @property
    def head_scale(self) -> float:
        """Factor of the scalar head's learning rate. It is 1 unless the head's outputs have a scale of their own.

        The engine reads this property after `prepare`.
        """

    def prepare(self, batch: Batch, dp_sum: Sum) -> tuple[Batch, Metrics]:
        """Add the fields that the loss needs to the items of this rank. Called once per step.

        Other samples of a prompt may be on other ranks. `rows.gather_samples` collects one value from each of them.
        """

    def sequences(self, batch: Batch) -> Ragged:
        """Select the token rows that the model runs on: the same number of consecutive rows for every item."""

    def weight(self, batch: Batch) -> float:
        """Return the total weight of these items in the loss, for example their number.

        The engine divides the loss of a mini-batch by its total weight over all ranks. A mini-batch of weight 0
        makes no optimizer step.
        """

    def loss(self, batch: Batch, output: ModelOutput) -> tuple[Tensor, Metrics]:
        """Sum the loss terms of a micro-batch to a scalar, and compute its metrics."""

    def stop(self, metrics: dict[str, float]) -> bool:
        """Decide from a mini-batch's global metrics whether to drop its gradient and skip all later mini-batches.

        Called on every rank after the losses of each mini-batch, before its update.
        """

    def finish(self) -> Metrics:
        """Compute metrics of the call as a whole. Called once, after the last mini-batch."""


@dataclass(frozen=True, eq=False)
class FunctionInput:
    """Input of a function call: the items of one rank.

    The argument `prefix` of its methods is the prefix of the keys `sequences` and `prompt_length`.
    """

    batch: Batch
    """The call's input keys, one row per item."""
    fields: Mapping[str, Sequence[Any]]
    """Extra columns of the records: name -> one value per item, None if a record lacks the column. Empty unless the
    call asks for them."""
    tokenizer: Any
    """The tokenizer of the run."""
    origins: Sequence[str] = ()
    """Source of each item's record, FILE:LINE; empty if unknown."""
    samples: int = 1
    """Number of samples per prompt in the step."""
    stop: StopStrings | None = None
    """Stop strings of the step's answers, if any."""

    def select(self, positions: Sequence[int]) -> "FunctionInput":
        """Select items by their positions."""
        fields = {name: [values[i] for i in positions] for name, values in self.fields.items()}
        origins = [self.origins[i] for i in positions] if self.origins else []
        return replace(self, batch=self.batch.select(positions), fields=fields, origins=origins)

    def prompts(self, prefix: str = "") -> list[str]:
        """Decode the prompts, without special tokens."""
        return [self._text(row[:cut]) for row, cut in self._cuts(prefix)]

    def completions(self, prefix: str = "") -> list[str]:
        """Decode the answers, without special tokens and without the stop string that ended them.

        In an environment, these are the last turns of the model.
        """
        text = self._text if self.stop is None else self.stop.cut
        answers = [row[cut:] for row, cut in self._cuts(prefix)]
        mask = f"{prefix}{ACTION_MASK}"
        if mask in self.batch.fields:
            marked = zip(answers, self._cuts(prefix), self.batch[mask].rows(), strict=True)
            answers = [find_last_turn(answer, row[cut:].tolist()) for answer, (_, cut), row in marked]
        return [text(answer) for answer in answers]

    def completion_ids(self, prefix: str = "") -> list[list[int]]:
        """List the tokens of the answers as they were sampled, with stop strings and special tokens.

        In an environment, the tokens that it wrote are among them.
        """
        return [row[cut:] for row, cut in self._cuts(prefix)]

    def describe(self, item: int) -> str:
        """Name an item in error messages: its record, and which sample of its prompt it is."""
        number = self.batch.ids[item]
        record = f"record {self.origins[item]}" if self.origins else f"item {number} of the step"
        if self.samples == 1:
            return record
        return f"{record}, sample {number % self.samples + 1} of {self.samples}"

    def _cuts(self, prefix: str) -> Iterator[tuple[list[int], int]]:
        lengths = self.batch[f"{prefix}prompt_length"].values.tolist()
        for row, cut in zip(self.batch[f"{prefix}sequences"].rows(), lengths, strict=True):
            yield row.tolist(), int(cut)

    def _text(self, ids: list[int]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True)
        return text


def find_last_turn(tokens: list[int], mask: Sequence[int]) -> list[int]:
    """Find the last run of tokens that the model sampled. `mask` is 1 for these tokens."""
    end = next((i + 1 for i in reversed(range(len(mask))) if mask[i]), 0)
    start = next((i + 1 for i in reversed(range(end)) if not mask[i]), 0)
    return tokens[start:end]


class FunctionMethod(Protocol):
    """Method of a `function` call. It runs on the host in a separate thread, while the rank runs other calls."""

    def load(self) -> None:
        """Prepare the function, on each rank that calls it, before models load. Raises UserError if that fails."""

    def wants(self, field: str) -> bool:
        """Return whether the function reads the extra column `field` of the records.

        Columns that no function wants are dropped.
        """

    def check_fields(self, source: str, fields: Collection[str]) -> None:
        """Check, after `load`, that a source has the columns that the function needs. Raises UserError if not."""

    def call(self, inputs: FunctionInput) -> tuple[dict[str, Ragged], Metrics]:
        """Compute the call's output keys, one row per item, and metrics of this rank's items.

        An exception ends the run.
        """


@runtime_checkable
class StatefulMethod(Protocol):
    """Method of a `function` call that keeps state from step to step."""

    def state_dict(self) -> Any:
        """Return the state as JSON values; None if there is none."""

    def load_state_dict(self, state: Any) -> None:
        """Restore the state that this rank saved or, if the number of ranks changed, the first rank's state."""


Method = GenerateMethod | InferenceMethod | TrainMethod | FunctionMethod


class Algorithm(Protocol):
    """Dataflow graphs of a training step and an evaluation, with a method for every call."""

    graph: DataflowGraph
    eval_graph: DataflowGraph | None
    """Graph that runs on evaluation records. All its roles are also in `graph`. None for no evaluation."""
    temperature: float
    """Temperature of all log-probabilities."""

    def method(self, call: str) -> Method:
        """Find the method of a call of either graph. Raises KeyError if the call has none."""

    def notes(self, metrics: Mapping[str, float]) -> list[str]:
        """List notes for the user about a step with these metrics (`call/name`). Each note is shown once."""

    def state_dict(self) -> dict[str, float]:
        """Return numbers that outlast a step, such as an adaptive coefficient.

        Every rank has its own algorithm object, which sees only the calls that the rank takes part in. A checkpoint
        keeps the state from the first rank of the first train call, so that call's method must know all of it.
        """

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore what `state_dict` returned."""


class StatelessAlgorithm:
    """Algorithm that consists of its graphs and a table of methods, without state or notes."""

    def __init__(
        self,
        graph: DataflowGraph,
        eval_graph: DataflowGraph | None,
        methods: Mapping[str, Method],
        temperature: float = 1.0,
    ) -> None:
        self.graph, self.eval_graph = graph, eval_graph
        self.temperature = temperature
        self._methods = methods

    def method(self, call: str) -> Method:
        return self._methods[call]

    def notes(self, metrics: Mapping[str, float]) -> list[str]:
        return []

    def state_dict(self) -> dict[str, float]:
        return {}

    def load_state_dict(self, state: dict[str, float]) -> None:
        pass


class PlainInference:
    """Base of inference methods that report no metrics."""

    def metrics(self, batch: Batch) -> Metrics:
        return Metrics()


class PlainTrain:
    """Defaults of a train method: one epoch, nothing to prepare, no early stop."""

    epochs: int = 1
    entropy: bool = False

    @property
    def head_scale(self) -> float:
        return 1.0

    def prepare(self, batch: Batch, dp_sum: Sum) -> tuple[Batch, Metrics]:
        return batch, Metrics()

    def stop(self, metrics: dict[str, float]) -> bool:
        return False

    def finish(self) -> Metrics:
        return Metrics()
