"""Sequences of a session with their columns: what a loop of your own samples, scores and trains on."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from realrl.api.errors import plain_errors
from realrl.config.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from realrl.data.batch import Ragged
    from realrl.recipe.stop_strings import StopStrings

_KEPT = ("sequences", "prompt_length")


class Batch:
    """Prompts with answers, and columns of numbers for them, in host memory.

    `batch["advantages"] = values` adds a column: one number for each sequence, or a list with a row for each
    sequence, which has a number for each token of the sequence or of its answer.
    """

    def __init__(
        self, columns: dict[str, "Ragged"], tokenizer: Any, stop: "StopStrings | None" = None
    ) -> None:
        self._columns, self._tokenizer, self._stop = columns, tokenizer, stop

    def __len__(self) -> int:
        return len(self._columns["sequences"])

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    @plain_errors
    def __getitem__(self, name: str) -> "Tensor | list[Tensor]":
        """Return a column: a tensor [N] with one number for each sequence, or a list with a tensor for each.

        Raises UserError if there is no such column.
        """
        if name not in self._columns:
            raise UserError(f"the batch has no column {name!r}; it has {', '.join(self._columns)}")
        column = self._columns[name]
        return column.rows() if self._has_rows(name) else column.values

    def __getattr__(self, name: str) -> "Tensor | list[Tensor]":
        """Return a column: `batch.logprobs` is `batch["logprobs"]`."""
        if name.startswith("_"):  # Python itself asks for some, also before there are columns
            raise AttributeError(name)
        if name not in self._columns:
            raise AttributeError(f"the batch has no column {name!r}; it has {', '.join(self._columns)}")
        return self[name]

    def _has_rows(self, name: str) -> bool:
        return self._columns[name].lengths == self._columns["sequences"].lengths

    @plain_errors
    def __setitem__(self, name: str, values: Any) -> None:
        import torch

        from realrl.data.batch import Ragged

        if not isinstance(name, str) or not name.isidentifier() or name.startswith("_") or name in _KEPT:
            raise UserError(
                f"column {name!r}: the name is not free, or is not a name of letters, digits and _"
            )
        rows = (
            isinstance(values, Sequence) and len(values) > 0 and not isinstance(values[0], int | float | bool)
        )
        count = len(values) if hasattr(values, "__len__") else None
        if count != len(self):
            raise UserError(f"column {name!r}: give one number or row for each of the {len(self)} sequences")
        if not rows:
            numbers = torch.as_tensor(values)
            if numbers.dim() == 1:
                self._columns[name] = Ragged.scalars(_convert(numbers))
                return
            values = list(values)
        lengths = self._columns["sequences"].lengths
        cuts = self._columns["prompt_length"].values.tolist()
        found = []
        for i, row in enumerate(values):
            numbers = _convert(torch.as_tensor(row))
            if numbers.dim() == 1 and len(numbers) == lengths[i] - cuts[i]:
                numbers = torch.cat([numbers.new_zeros(cuts[i]), numbers])
            if numbers.shape != (lengths[i],):
                raise UserError(
                    f"column {name!r}: row {i} has shape {list(numbers.shape)}; the sequence has {lengths[i]}"
                    f" tokens, and its answer {lengths[i] - cuts[i]}"
                )
            found.append(numbers)
        self._columns[name] = Ragged.of(found)

    @property
    def sequences(self) -> list[list[int]]:
        """Tokens of each prompt with its answer."""
        return [row.tolist() for row in self._columns["sequences"].rows()]

    @property
    def prompt_lengths(self) -> list[int]:
        """Number of prompt tokens of each sequence."""
        return [int(length) for length in self._columns["prompt_length"].values]

    @property
    def completion_ids(self) -> list[list[int]]:
        """Tokens of each answer, as sampled: with end-of-sequence or stop string."""
        return [row[cut:] for row, cut in zip(self.sequences, self.prompt_lengths, strict=True)]

    @property
    def completions(self) -> list[str]:
        """Text of each answer, without special tokens and without the stop string that ended it."""
        cut = self._decode if self._stop is None else self._stop.cut
        return [cut(ids) for ids in self.completion_ids]

    @property
    def prompts(self) -> list[str]:
        """Text of each prompt, without special tokens."""
        pairs = zip(self.sequences, self.prompt_lengths, strict=True)
        return [self._decode(row[:cut]) for row, cut in pairs]

    @property
    def finished(self) -> list[bool]:
        """Whether each sampled answer ended by itself, rather than at max_new_tokens."""
        return [bool(value) for value in self._columns["finished"].values]

    def select(self, indices: Sequence[int]) -> "Batch":
        """Copy some sequences with their columns, in the order of `indices`: for example a mini-batch."""
        columns = {name: column.select(indices) for name, column in self._columns.items()}
        return Batch(columns, self._tokenizer, self._stop)

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def __repr__(self) -> str:
        return f"Batch({len(self)} sequences, columns {', '.join(self._columns)})"


def _convert(numbers: "Tensor") -> "Tensor":
    """Convert numbers to a type that batches hold: bool to float32, float16 and bfloat16 to float32."""
    import torch

    numbers = numbers.detach().cpu()
    if numbers.dtype in (torch.float32, torch.float64, torch.int64, torch.int32, torch.int16):
        return numbers
    return numbers.float()
