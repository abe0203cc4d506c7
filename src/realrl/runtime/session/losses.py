"""Methods of session calls: log-probabilities and values of sequences, and a loss that the user wrote."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from realrl.algorithms.base.method import Metrics, ModelOutput, PlainInference, PlainTrain
from realrl.algorithms.base.rows import Responses, interleave
from realrl.config.errors import UserError, join
from realrl.config.user_code import user_errors
from realrl.data.batch import Batch, Ragged
from realrl.runtime.session.recipe import SEQUENCES

Aggregate = Literal["token_mean", "sequence_mean", "sequence_sum", "per_sequence", "per_group"]
"""How the losses of a batch become one number. The first three take a loss for each answer token: the mean over all
of them, or the mean over sequences of each sequence's mean or sum. The last two take a loss for each sequence or
group, and average these."""
RESULT = "result"
"""Key of the numbers that inference returns."""
PROMPT_LENGTH = "prompt_length"


class MicroBatch:
    """Columns of some sequences of a batch, as a loss sees them: tensors on the device, without padding.

    A column with a row for each sequence has the answer tokens of all sequences back to back, [A]. A column with
    one number for each sequence is repeated for each of its answer tokens, [A].
    """

    def __init__(self, columns: Mapping[str, Ragged], answers: Responses) -> None:
        self._columns, self._answers = columns, answers

    def __getattr__(self, name: str) -> Tensor:
        if name.startswith("_") or name not in self._columns:
            raise AttributeError(f"the batch has no column {name!r}; it has {', '.join(self._columns)}")
        column = self._columns[name]
        if column.lengths == self._answers.lengths:
            return column.values[self._answers.index]
        return column.values[self._answers.row]

    def __len__(self) -> int:
        return len(self._answers.lengths)

    def of_sequences(self, name: str) -> Tensor:
        """Return a column with one number for each sequence, [N]."""
        column = self._columns[name]
        if len(column.values) != len(self):
            raise AttributeError(f"column {name!r} has a row for each sequence, not a number")
        return column.values

    @property
    def counts(self) -> Tensor:
        """Number of answer tokens of each sequence, [N]."""
        return self._answers.counts

    def sum(self, values: Tensor) -> Tensor:
        """Sum the values of each sequence's answer tokens. [A] -> [N]"""
        return values.new_zeros(len(self)).index_add(0, self._answers.row, values)

    def mean(self, values: Tensor) -> Tensor:
        """Average the values of each sequence's answer tokens; 0 without such tokens. [A] -> [N]"""
        return self.sum(values) / self.counts.clamp(min=1)


class Outputs:
    """What a model computes for the answer tokens of a micro-batch, [A] each."""

    def __init__(self, output: ModelOutput, answers: Responses) -> None:
        self._output, self._answers = output, answers

    @property
    def logprobs(self) -> Tensor:
        """Log-probability of each token at the session's temperature, with gradient. For language models."""
        return self._take(self._output.logprobs, "logprobs", 0).float()

    @property
    def entropy(self) -> Tensor:
        """Entropy of the distribution that each token comes from, without gradient; needs `entropy=True`."""
        return self._take(self._output.entropy, "entropy", 0)

    @property
    def values(self) -> Tensor:
        """Output of a scalar head just before each token, with gradient: the value of the state."""
        return self._take(self._output.values, "values", -1).float()

    def _take(self, values: Tensor | None, name: str, offset: int) -> Tensor:
        if values is None:
            raise AttributeError(f"this model computes no {name} here")
        return values[self._answers.index + offset]


LossFunction = Callable[[Outputs, MicroBatch], Any]
"""Loss that a user wrote: (outputs of the model, columns) -> losses, or (losses, metrics by name)."""


class SequenceInference(PlainInference):
    """Log-probabilities of each sequence, or the values of a scalar head, as the output `RESULT`."""

    def sequences(self, batch: Batch) -> Ragged:
        return batch[SEQUENCES]

    def outputs(self, batch: Batch, output: ModelOutput) -> dict[str, Ragged]:
        numbers = output.values if output.logprobs is None else output.logprobs
        assert numbers is not None, "a model has one of the two heads"
        return {RESULT: Ragged(numbers.float(), output.lengths)}


class UserLoss(PlainTrain):
    """Train method with a loss of the user. An item is a group of sequences, which stay in one micro-batch.

    The function never divides by a number of tokens or sequences: the engine divides by that of the whole batch, so
    gradients do not depend on micro-batches or ranks.
    """

    def __init__(
        self,
        function: LossFunction,
        aggregate: Aggregate,
        columns: Sequence[str],
        *,
        group: int,
        entropy: bool,
    ) -> None:
        """`columns`: names of the batch's columns, of which each item has one row per sequence of its group."""
        if aggregate not in get_args(Aggregate):
            raise UserError(f"aggregate={aggregate!r} is not {join(get_args(Aggregate), 'or')}")
        self._function, self._aggregate, self._columns = function, aggregate, columns
        self._group, self.entropy = group, entropy

    def sequences(self, batch: Batch) -> Ragged:
        return self._join(batch, SEQUENCES)

    def _join(self, batch: Batch, name: str) -> Ragged:
        """Put the rows of each item's group next to each other."""
        return interleave(batch, [name_part(name, place) for place in range(self._group)])

    def weight(self, batch: Batch) -> float:
        match self._aggregate:
            case "token_mean":
                return Responses.of(self.sequences(batch), self._join(batch, PROMPT_LENGTH)).total
            case "per_group":
                return len(batch)
        return len(batch) * self._group

    def loss(self, batch: Batch, output: ModelOutput) -> tuple[Tensor, Metrics]:
        columns = {name: self._join(batch, name) for name in self._columns}
        answers = Responses.of(columns[SEQUENCES], columns[PROMPT_LENGTH])
        seen = MicroBatch(columns, answers)
        with user_errors("the loss", "raised", passing=(UserError,), function=self._function):
            returned = self._function(Outputs(output, answers), seen)
        losses, named = returned if isinstance(returned, tuple) else (returned, {})
        if not isinstance(named, Mapping):
            raise UserError(f"the loss returned a {type(named).__name__} in place of a mapping of metrics")
        self._check(losses, answers, len(batch))
        metrics = Metrics()
        for name, values in named.items():
            numbers = torch.as_tensor(values).detach().double()
            if numbers.dim() != 1 or len(numbers) not in (answers.total, len(seen), len(batch)):
                raise UserError(
                    f"metric {name!r} of the loss has shape {list(numbers.shape)}; it needs one number for each"
                    f" of the {answers.total} answer tokens or the {len(seen)} sequences"
                )
            metrics.mean(name, numbers.sum(), numbers.numel())
        match self._aggregate:
            case "sequence_mean":
                return seen.mean(losses).sum(), metrics
            case _:
                return losses.sum(), metrics

    def _check(self, losses: Any, answers: Responses, groups: int) -> None:
        """Raise UserError unless there is one loss for each answer token, sequence or group."""
        match self._aggregate:
            case "per_sequence":
                of, count = "sequence", len(answers.lengths)
            case "per_group":
                of, count = "group", groups
            case _:
                of, count = "answer token", answers.total
        if isinstance(losses, Tensor) and losses.shape == (count,):
            return
        found = f"shape {list(losses.shape)}" if isinstance(losses, Tensor) else f"a {type(losses).__name__}"
        hint = "; do not average it yourself" if isinstance(losses, Tensor) and losses.dim() == 0 else ""
        raise UserError(
            f"the loss has {found}; aggregate={self._aggregate!r} needs a tensor with one number for each {of},"
            f" here [{count}]{hint}"
        )


def name_part(column: str, place: int) -> str:
    """Name the key that holds a column of the sequences at one place in their groups."""
    return f"{column}.{place}"
