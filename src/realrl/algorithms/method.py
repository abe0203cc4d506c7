"""Methods: the tensor functions of an algorithm for each of its calls, independent of devices."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from realrl.data.batch import Batch, Ragged
from realrl.dataflow.graph import DataflowGraph
from realrl.recipe.generation import GenerationConfig
from realrl.recipe.stop_strings import StopStrings

Sum = Callable[[Tensor], Tensor]
"""Function that all-reduces a tensor over the data-parallel ranks of a call."""


@dataclass(frozen=True, eq=False)
class ModelOutput:
    """Outputs of a model for packed sequences of T tokens in all; `lengths` are those of the sequences.

    logprobs: [T] for a language-model head: log p(token t | tokens before it), 0 at each sequence's first
    token, at the sampling temperature. entropy: [T] likewise, without gradient. values: [T] for a scalar
    head. candidates: [T, k] int64 ids of the call's `candidates`, in the place of token t; candidate_logprobs:
    [T, k] log p of each, given the tokens before t, 0 at each sequence's first token.
    """

    lengths: tuple[int, ...]
    logprobs: Tensor | None = None
    entropy: Tensor | None = None
    values: Tensor | None = None
    candidates: Tensor | None = None
    candidate_logprobs: Tensor | None = None


@dataclass
class Metrics:
    """Metrics that add up over micro-batches and ranks: weighted means, and maxima.

    means: name -> (sum, weight); maxima: name -> value. All are zero-dimensional tensors without gradient. Every
    data-parallel rank of a call must have the same names in the same order, with weight 0 where it has nothing to
    add.
    """

    means: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    maxima: dict[str, Tensor] = field(default_factory=dict)

    def mean(self, name: str, total: Tensor, weight: Tensor | float) -> None:
        """Add `total` out of `weight` to a mean."""
        total = total.detach().double()
        if isinstance(weight, Tensor):
            weight = weight.to(total.device, torch.float64)
        else:  # filled in on the device: a copy would make the host wait for it
            weight = torch.full((), weight, dtype=torch.float64, device=total.device)
        if name in self.means:
            old_total, old_weight = self.means[name]
            total, weight = old_total + total, old_weight + weight
        self.means[name] = (total, weight)

    def max(self, name: str, value: Tensor) -> None:
        """Raise a maximum to at least `value`."""
        value = value.detach().double()
        self.maxima[name] = torch.maximum(self.maxima[name], value) if name in self.maxima else value

    def update(self, other: "Metrics") -> None:
        """Add another collection to this one."""
        for name, (total, weight) in other.means.items():
            self.mean(name, total, weight)
        for name, value in other.maxima.items():
            self.max(name, value)

    def to_plain(self) -> dict[str, Any]:
        """Convert to numbers only, as JSON can hold them; see `from_plain`."""
        means = {name: (float(total), float(weight)) for name, (total, weight) in self.means.items()}
        return {"means": means, "maxima": {name: float(value) for name, value in self.maxima.items()}}

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> "Metrics":
        """Restore the collection that `to_plain` described."""
        metrics = cls()
        for name, (total, weight) in plain["means"].items():
            metrics.mean(name, torch.tensor(total, dtype=torch.float64), weight)
        for name, value in plain["maxima"].items():
            metrics.max(name, torch.tensor(value, dtype=torch.float64))
        return metrics

    def result(self) -> dict[str, float]:
        """Compute plain numbers; a mean of weight 0 is NaN."""
        out = {name: float(total / weight) for name, (total, weight) in self.means.items()}
        return out | {name: float(value) for name, value in self.maxima.items()}


@dataclass(frozen=True)
class GenerateMethod:
    """Method of a `generate` call: continues `prompts`, and yields the call's outputs.

    These are sequences (prompt and continuation), logprobs (aligned with sequences, 0 on the prompt),
    prompt_length and finished (1 if the answer ends with end-of-sequence or a stop string, else 0), each with
    the call's prefix. Steps of evaluation sample as `eval_sampling` says.
    """

    sampling: GenerationConfig
    eval_sampling: GenerationConfig
    prompts: str = "prompts"

    def sampling_of(self, *, evaluation: bool) -> GenerationConfig:
        """Give the sampling settings of evaluation, or of training."""
        return self.eval_sampling if evaluation else self.sampling


class InferenceMethod(Protocol):
    """Method of an `inference` call: runs the model without gradient."""

    def sequences(self, batch: Batch) -> Ragged:
        """Select the token rows to run the model on; a fixed number of consecutive rows per item."""

    def outputs(self, batch: Batch, output: ModelOutput) -> dict[str, Ragged]:
        """Compute the call's output keys, a row per item."""

    def metrics(self, batch: Batch) -> Metrics:
        """Compute metrics of a batch that has the call's outputs among its fields."""


class TrainMethod(Protocol):
    """Method of a `train` call.

    `prepare` is called once, then for each epoch and mini-batch the losses of micro-batches are summed.
    """

    epochs: int
    """Number of passes over the items of a step."""
    entropy: bool
    """Whether `loss` uses the entropy, which costs time to compute."""

    @property
    def head_scale(self) -> float:
        """The scalar head's learning rate is multiplied by this; 1 but where its outputs have a scale of their own.
        Asked after `prepare`."""

    def prepare(self, batch: Batch, dp_sum: Sum) -> tuple[Batch, Metrics]:
        """Called once per step with all items of this rank; adds what the loss needs.

        Other samples of a prompt may be on other ranks: `samples.gather_samples` brings a value of all together."""

    def sequences(self, batch: Batch) -> Ragged:
        """Select the token rows to run the model on; a fixed number of consecutive rows per item."""

    def weight(self, batch: Batch) -> float:
        """Weight of the terms that the loss of these items is a sum of, such as their number; the engine
        divides by its global total. A mini-batch without any makes no optimizer step."""

    def loss(self, batch: Batch, output: ModelOutput) -> tuple[Tensor, Metrics]:
        """Compute the sum of the loss terms of a micro-batch, a scalar, and its metrics."""

    def stop(self, metrics: dict[str, float]) -> bool:
        """Decide whether to drop this mini-batch's gradient and the rest of the call, given its global metrics.

        Asked on every rank after each mini-batch's losses, before its update.
        """

    def finish(self) -> Metrics:
        """Called once after the last mini-batch of the call; metrics of the call as a whole."""


@dataclass(frozen=True, eq=False)
class FunctionInput:
    """Input of a function call: the items of one rank."""

    batch: Batch
    """The call's input keys, a row per item."""
    fields: Mapping[str, Sequence[Any]]
    """Fields of the items' records that no key is made of: name -> a value per item, None where a record has no
    such field. Empty unless the call asks for them."""
    tokenizer: Any
    """The tokenizer of the run."""
    origins: Sequence[str] = ()
    """Where each item's record comes from, FILE:LINE; empty where that is not known."""
    samples: int = 1
    """Number of samples of each prompt in the step."""
    stop: StopStrings | None = None
    """Stop strings of the step's answers; None if there are none."""

    def prompts(self, prefix: str = "") -> list[str]:
        """Decode prompts, without special tokens; of `sequences`, cut at `prompt_length`, both with `prefix`."""
        return [self._text(row[:cut]) for row, cut in self._cuts(prefix)]

    def completions(self, prefix: str = "") -> list[str]:
        """Decode what follows the prompts, without special tokens, up to a stop string that ended it."""
        text = self._text if self.stop is None else self.stop.cut
        return [text(row[cut:]) for row, cut in self._cuts(prefix)]

    def completion_ids(self, prefix: str = "") -> list[list[int]]:
        """List the tokens of completions as they were sampled, stop strings and special ones included."""
        return [row[cut:] for row, cut in self._cuts(prefix)]

    def describe(self, item: int) -> str:
        """Describe the `item`-th item for error messages: its record, and which sample of its prompt it is."""
        number = self.batch.ids[item]
        record = f"record {self.origins[item]}" if self.origins else f"item {number} of the step"
        return (
            record if self.samples == 1 else f"{record}, sample {number % self.samples + 1} of {self.samples}"
        )

    def _cuts(self, prefix: str) -> Iterator[tuple[list[int], int]]:
        lengths = self.batch[f"{prefix}prompt_length"].values.tolist()
        for row, cut in zip(self.batch[f"{prefix}sequences"].rows(), lengths, strict=True):
            yield row.tolist(), int(cut)

    def _text(self, ids: list[int]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True)
        return text


class FunctionMethod(Protocol):
    """A `function` call: runs on the host, without a model, while its rank goes on with other calls."""

    def load(self) -> None:
        """Get ready on a rank that calls it, before anything of models is loaded; UserError where that fails."""

    def wants(self, field: str) -> bool:
        """Tell whether it looks at a further field of records; those that no function wants are not kept."""

    def check_fields(self, source: str, fields: Collection[str]) -> None:
        """Check that `fields` of a source are all that it needs, after `load`; else UserError."""

    def call(self, inputs: FunctionInput) -> tuple[dict[str, Ragged], Metrics]:
        """Compute the call's output keys, a row per item, and metrics of this rank's items.

        Called in another thread than everything else; what it raises ends the run.
        """


@runtime_checkable
class StatefulMethod(Protocol):
    """A method of a function that keeps something from step to step."""

    def state_dict(self) -> Any:
        """Save it as JSON values; None where there is nothing."""

    def load_state_dict(self, state: Any) -> None:
        """Load what `state_dict` saved, on this rank or, on another number of ranks, on the first one."""


Method = GenerateMethod | InferenceMethod | TrainMethod | FunctionMethod


class Algorithm(Protocol):
    """Dataflow graphs of a training step and an evaluation, with a method for every call."""

    graph: DataflowGraph
    eval_graph: DataflowGraph | None
    """Calls of roles in `graph`; runs on evaluation records."""
    temperature: float
    """Temperature of all log-probabilities."""

    def method(self, call: str) -> Method:
        """Find the method of a call of either graph."""

    def notes(self, metrics: Mapping[str, float]) -> list[str]:
        """List notes for the user on a training step with these metrics, by `call/name`; each is shown once."""

    def state_dict(self) -> dict[str, float]:
        """Save numbers that outlast a step, such as an adaptive coefficient; empty where there are none.

        Every rank has an algorithm of its own, which sees only calls that the rank takes part in. What is saved is
        the state of the first rank of the first train call, in the order of `graph`: that call's method must know
        all of it.
        """

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Load what `state_dict` saved."""
