"""Functions on packed rows of a batch: answers within sequences, ends of rows, pairs, and samples of a prompt."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from realrl.algorithms.base.method import Metrics, Sum
from realrl.config.errors import UserError
from realrl.data.batch import Batch, Ragged, copy_numbers
from realrl.dataflow.environment import ACTION_MASK


@dataclass(frozen=True, eq=False)
class Responses:
    """The A answer tokens in N packed sequences with T tokens in total.

    In an environment, they are the tokens that the model sampled, and not those that the environment wrote.

    index: [A] ascending positions of the answer tokens among the T tokens. An answer never starts a sequence, so
    `index - 1` is always in the same sequence. row: [A] number of the sequence that holds each answer token.
    column: [A] number of answer tokens before it in its sequence. counts: [N] answer tokens per sequence. lengths:
    N numbers of tokens.
    """

    index: Tensor
    row: Tensor
    column: Tensor
    counts: Tensor
    lengths: tuple[int, ...]

    @classmethod
    def of(
        cls,
        sequences: Ragged,
        prompt_length: Ragged,
        *,
        kept: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> "Responses":
        """Find the answers. sequences: N rows of tokens; prompt_length: N rows of one number.

        kept: [N] nonzero for sequences that count. All other sequences get no answer tokens. None keeps all.
        mask: [T] nonzero for the tokens after the prompts that are answers. None keeps all.
        """
        device = sequences.values.device
        lengths = copy_numbers(sequences.lengths, device)
        starts = lengths.cumsum(0) - lengths
        prompt = prompt_length.values.clamp(min=1)
        tokens = len(sequences.values)
        rows = torch.arange(len(sequences), device=device).repeat_interleave(lengths, output_size=tokens)
        column = torch.arange(len(rows), device=device) - (starts + prompt)[rows]
        counts = (lengths - prompt).clamp(min=0)
        if kept is not None:
            counts = torch.where(kept != 0, counts, 0)
        chosen = (column >= 0) & (counts > 0)[rows]
        if mask is not None:
            chosen &= mask != 0
            before = chosen.long().cumsum(0)
            counts = torch.zeros_like(counts).index_add(0, rows, chosen.long())
            column = before - 1 - (counts.cumsum(0) - counts)[rows]
        index = chosen.nonzero().squeeze(1)
        return cls(index, rows[index], column[index], counts, sequences.lengths)

    @classmethod
    def find(cls, batch: Batch, kept: Tensor | None = None) -> "Responses":
        """Find the answers in `sequences`.

        Only the answers that `kept`, or else the field `kept`, marks count, and only the tokens that the field
        `action_mask` marks, if there is such a field.
        """
        if kept is None and "kept" in batch.fields:
            kept = batch["kept"].values
        mask = batch[ACTION_MASK].values if ACTION_MASK in batch.fields else None
        return cls.of(batch["sequences"], batch["prompt_length"], kept=kept, mask=mask)

    @property
    def total(self) -> int:
        """Number A of answer tokens."""
        return len(self.index)

    def row_sums(self, values: Tensor) -> Tensor:
        """Sum per sequence. values: [A] -> [N] float64"""
        return row_sums(values, self.row, len(self.lengths))

    def pad(self, values: Tensor) -> Tensor:
        """Put each answer into its own row, and fill the row with zeros. values: [A] -> [N, longest answer]"""
        width = int(self.counts.max()) if len(self.lengths) else 0
        out = values.new_zeros(len(self.lengths), width)
        out[self.row, self.column] = values
        return out

    def unpad(self, padded: Tensor) -> Tensor:
        """Invert `pad`. padded: [N, longest answer] -> [A]"""
        return padded[self.row, self.column]

    def spread(self, values: Tensor) -> Ragged:
        """Make rows as long as the sequences, with `values` on the answers and 0 on the prompts. [A] -> [T]"""
        out = values.new_zeros(sum(self.lengths))
        out[self.index] = values
        return Ragged(out, self.lengths)


AGES = "ages"
"""Field with the age of each answer token: the number of training steps since the weights that sampled it. A train
call has it if samples may come from weights of earlier steps."""


def find_ages(batch: Batch, *, oldest: int, part: int, limit: int) -> Ragged:
    """Find the age of each answer token, in training steps, as rows like `sequences`; 0 on prompts.

    The first `part` tokens of an answer are `oldest` steps old, the next `part` tokens are one step younger, and so
    on. `limit`: age of the first weights that sampled. No token is older.
    """
    answers = Responses.find(batch)
    return answers.spread((oldest - answers.column // part).clamp(max=limit).float())


def row_sums(values: Tensor, row: Tensor, count: int) -> Tensor:
    """Sum per packed row. values: [A], each in the row given by `row` [A] -> [count] float64

    Double precision keeps the sum of a row independent of the batch around it.
    """
    out = torch.zeros(count, dtype=torch.float64, device=values.device)
    return out.index_add(0, row, values.double())


def last_of_rows(values: Tensor, lengths: Sequence[int]) -> Tensor:
    """Select the last value of each packed row; no row may be empty. values: [sum(lengths)] -> [N]"""
    return values[copy_numbers(lengths, values.device).cumsum(0) - 1]


def interleave(batch: Batch, keys: Sequence[str]) -> Ragged:
    """Put the rows of each item next to each other, in the order of `keys`.

    So all rows of an item stay in one micro-batch.
    """
    items = zip(*(batch[key].rows() for key in keys), strict=True)
    return Ragged.of((row for item in items for row in item), dtype=batch[keys[0]].values.dtype)


def add_answer_means(metrics: Metrics, batch: Batch) -> None:
    """Add the mean answer length in tokens and the share of finished answers to `metrics`.

    A trajectory whose environment failed has no tokens, and does not count.
    """
    tokens = Responses.find(batch).counts
    given = tokens > 0
    metrics.mean("response_tokens", tokens.sum(), given.sum())
    metrics.mean("finished", batch["finished"].values[given].double().sum(), given.sum())


# Preference pairs.


def pair_rows(batch: Batch) -> Ragged:
    """Order the rows as chosen 0, rejected 0, chosen 1, ..."""
    return interleave(batch, ("chosen", "rejected"))


def pair_weights(batch: Batch) -> Tensor:
    """Compute a weight for each pair, so that all pairs of a prompt together count as one. [N] float64"""
    return 1 / batch["pairs_of_prompt"].values.double()


def add_pair_means(metrics: Metrics, batch: Batch, **values: Tensor) -> None:
    """Add the weighted mean over pairs of each of `values` to `metrics`. values: [N] each"""
    weights = pair_weights(batch)
    for name, of in values.items():
        metrics.mean(name, (of.double() * weights).sum(), weights.sum())


def rate_order(difference: Tensor) -> Tensor:
    """Rate each difference: 1 if it is positive, 0 if negative, 0.5 for a tie. Any shape -> the same, float64"""
    return (difference > 0).double() + 0.5 * (difference == 0).double()


# Samples of a prompt, which may lie on any data-parallel rank.


def gather_samples(
    values: Tensor, ids: Sequence[int], *, prompts: int | None, samples: int, dp_sum: Sum
) -> Tensor:
    """Gather one value per item of a step, one row per prompt: [prompts, samples] float64, equal on every rank.

    values: [N], one for each item of this rank. ids: numbers of these items, from the batch that
    `TrainMethod.prepare` gets. Item i is sample i % `samples` of prompt i // `samples`. prompts: number of prompts;
    None for as many as the items of all ranks have, in a step with portions. Each rank fills a table with zeros for
    items of other ranks, and the tables are added up. So the result is exact, and does not depend on which rank
    holds an item. Raises UserError, on every rank, unless the items of all ranks are exactly these samples. With
    `prompts` None, it cannot notice that all samples of a prompt are missing.
    """
    if prompts is None:
        prompts = int(dp_sum(torch.tensor([len(ids)], device=values.device))) // samples
    items = prompts * samples
    here = torch.tensor(list(ids), dtype=torch.int64, device=values.device)
    known = (here >= 0) & (here < items)
    gathered = torch.zeros(2, items, dtype=torch.float64, device=values.device)
    table, counts = gathered
    table[here[known]] = values.detach().double()[known]
    counts.index_add_(0, here[known], torch.ones_like(here[known], dtype=torch.float64))
    beyond = (~known).sum().double()
    # One reduction for everything, so that every rank learns of a mistake on any rank.
    reduced = dp_sum(torch.cat((gathered.flatten(), beyond[None])))
    table, counts = reduced[:-1].view(2, items)
    if reduced[-1] > 0 or (counts != 1).any():
        raise UserError(_describe_mistake(counts, int(reduced[-1]), prompts, samples))
    return table.view(prompts, samples)


def _describe_mistake(counts: Tensor, beyond: int, prompts: int, samples: int) -> str:
    """Describe missing, repeated and unknown items of a step.

    counts: [prompts * samples] how often each item occurs; beyond: number of items outside this range
    """
    problems = []
    for what, wrong in (("missing", counts == 0), ("repeated", counts > 1)):
        found = wrong.nonzero().flatten().tolist()
        if found:
            listed = ", ".join(map(str, found[:5])) + (", ..." if len(found) > 5 else "")
            problems.append(f"{what}: {listed}")
    if beyond:
        problems.append(f"beyond these: {beyond}")
    return (
        f"gather_samples: the items of a step must be 0 to {prompts * samples - 1}, each once, for {samples}"
        f" samples of each of {prompts} prompts ({'; '.join(problems)}); samples_per_prompt of the algorithm's"
        " description says how many samples are taken"
    )
