"""Index arithmetic on packed rows: response tokens, and ends of rows."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from realrl.data.batch import Ragged, copy_numbers


@dataclass(frozen=True, eq=False)
class Responses:
    """The A tokens that follow the prompts in N packed sequences of T tokens in all.

    index: [A] their places among the T tokens, ascending; never a sequence's first token, so `index - 1` is
    the token before in the same sequence. row: [A] the sequence each belongs to. column: [A] how many
    response tokens of the sequence come before it. counts: [N] response tokens of each sequence.
    """

    index: Tensor
    row: Tensor
    column: Tensor
    counts: Tensor
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, sequences: Ragged, prompt_length: Ragged, *, kept: Tensor | None = None) -> "Responses":
        """Find the responses. sequences: N rows of tokens; prompt_length: N rows of one number.

        kept: [N] nonzero for sequences that count; the others have no response tokens here. None for all.
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
        index = ((column >= 0) & (counts > 0)[rows]).nonzero().squeeze(1)
        return cls(index, rows[index], column[index], counts, sequences.lengths)

    @property
    def total(self) -> int:
        """Number A of response tokens."""
        return len(self.index)

    def row_sums(self, values: Tensor) -> Tensor:
        """Sum per sequence. values: [A] -> [N] float64"""
        return row_sums(values, self.row, len(self.lengths))

    def pad(self, values: Tensor) -> Tensor:
        """Pad to one sequence per row, zeros at the end. values: [A] -> [N, longest response]"""
        width = int(self.counts.max()) if len(self.lengths) else 0
        out = values.new_zeros(len(self.lengths), width)
        out[self.row, self.column] = values
        return out

    def unpad(self, padded: Tensor) -> Tensor:
        """Invert `pad`. padded: [N, longest response] -> [A]"""
        return padded[self.row, self.column]

    def spread(self, values: Tensor) -> Ragged:
        """Extend to rows as long as the sequences, 0 on the prompts. values: [A] -> values [T]"""
        out = values.new_zeros(sum(self.lengths))
        out[self.index] = values
        return Ragged(out, self.lengths)


def row_sums(values: Tensor, row: Tensor, count: int) -> Tensor:
    """Sum per packed row. values: [A], each in the row that `row` [A] says -> [count] float64

    In double precision, so that the sum of a row does not depend on the batch around it.
    """
    out = torch.zeros(count, dtype=torch.float64, device=values.device)
    return out.index_add(0, row, values.double())


def last_of_rows(values: Tensor, lengths: Sequence[int]) -> Tensor:
    """Select the last value of each packed row. values: [sum(lengths)], every row at least one long -> [N]"""
    return values[copy_numbers(lengths, values.device).cumsum(0) - 1]
