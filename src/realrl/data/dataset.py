"""Tokenised data sets, and the order in which a run goes through them."""

import math
from array import array
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
import torch

from realrl.config.data import DataConfig
from realrl.config.errors import UserError
from realrl.data.batch import Batch, Ragged
from realrl.data.forms import BadRecordError, Item, Reader, form_of
from realrl.data.records import read_records
from realrl.data.rejects import Rejects
from realrl.data.shuffle import permutation
from realrl.data.tokenization import check_tokenizer, complaint, field, tokenize

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

CHUNK = 4096
"""Items tokenised at a time: enough to keep the tokenizer's threads busy, few enough to stay small."""


class Dataset:
    """All items of a source, tokenised: one row of numbers per item for every source key of a graph."""

    def __init__(self, fields: dict[str, Ragged], *, skipped: int = 0, reasons: Sequence[str] = ()) -> None:
        """`fields`: integer rows per key, equally many for each. `skipped` and `reasons`: see attributes."""
        self._fields = fields
        self.skipped = skipped
        """How many records, or pairs made of a record, were left out."""
        self.reasons = tuple(reasons)
        """Why the first few of them were, each as FILE:LINE: sentence."""

    def __len__(self) -> int:
        return len(next(iter(self._fields.values())))

    def batch(self, indices: Sequence[int]) -> Batch:
        """The items at `indices`, with ids 0, 1, 2, ... and int64 rows."""
        rows = {key: rows.select(indices) for key, rows in self._fields.items()}
        fields = {key: Ragged(chosen.values.long(), chosen.lengths) for key, chosen in rows.items()}
        return Batch(tuple(range(len(indices))), fields)

    @classmethod
    def load(
        cls,
        source: str,
        keys: tuple[str, ...],
        tokenizer: "PreTrainedTokenizerFast",
        config: DataConfig,
        seed: int,
    ) -> "Dataset":
        """Read and tokenise `source` (see `read_records`) into the rows that `keys` name.

        UserError where the source or the tokenizer cannot be used, nothing is left, or, under
        `config.on_error=fail`, at the first record that is malformed or too long.
        """
        check_tokenizer(tokenizer)
        rejects = Rejects(config.on_error)
        values = {key: array("i") for key in keys}
        lengths: dict[str, list[int]] = {key: [] for key in keys}
        items = _items(source, keys, Reader(tokenizer, config.max_pairs_per_prompt, seed), rejects)
        while chunk := list(islice(items, CHUNK)):
            rows = iter(tokenize([text for _, item in chunk for text in item], tokenizer))
            for origin, item in chunk:
                item_rows = list(islice(rows, len(item)))
                reason = complaint(item_rows, config)
                if reason is not None:
                    rejects(origin, reason)
                    continue
                for key in keys:
                    row = field(key, item_rows)
                    values[key].extend(row)
                    lengths[key].append(len(row))
        if not lengths[keys[0]]:
            why = (
                f"all {rejects.count} were skipped, first {rejects.reasons[0]}"
                if rejects.count
                else "it is empty"
            )
            raise UserError(f"no usable records in {source}: {why}")
        fields = {key: Ragged(torch.from_numpy(np.array(values[key])), tuple(lengths[key])) for key in keys}
        return cls(fields, skipped=rejects.count, reasons=rejects.reasons)


def _items(
    source: str, keys: tuple[str, ...], reader: Reader, rejects: Rejects
) -> Iterator[tuple[str, Item]]:
    form = form_of(keys)
    for origin, record in read_records(source, rejects):
        # A table has every column in every row: an absent field is null there.
        present = {name: value for name, value in record.items() if value is not None}
        try:
            items = form(reader, present)
        except BadRecordError as error:
            rejects(origin, str(error))
            continue
        for item in items:
            yield origin, item


class Order:
    """Which items each training step takes: permutations of the data set, one per epoch, laid end to end and
    cut into batches. A function of the seed and the step alone."""

    def __init__(self, size: int, batch: int, seed: int, shuffle: bool = True) -> None:
        """UserError where a batch is larger than the data set."""
        if batch > size:
            raise UserError(f"data.batch={batch} is more than the {size} records of the training data")
        self.size = size
        self.batch = batch
        self.seed = seed
        self.shuffle = shuffle
        self._cached: tuple[int, np.ndarray] | None = None

    def steps(self, epochs: float) -> int:
        """Steps in which every item is taken at least `epochs` times."""
        return math.ceil(epochs * self.size / self.batch - 1e-9)

    def indices(self, step: int) -> list[int]:
        """The items of a step, counted from 0: `batch` indices; only where two epochs meet may one recur."""
        first = step * self.batch
        epoch, offset = divmod(first, self.size)
        head = self._epoch(epoch)[offset : offset + self.batch]
        rest = self.batch - len(head)
        return [*head.tolist(), *(self._epoch(epoch + 1)[:rest].tolist() if rest else ())]

    def _epoch(self, epoch: int) -> np.ndarray:
        if not self.shuffle:
            return np.arange(self.size)
        if self._cached is None or self._cached[0] != epoch:
            self._cached = epoch, permutation(self.size, seed=self.seed, stream=epoch)
        return self._cached[1]


def eval_batches(size: int, batch: int) -> list[list[int]]:
    """Items 0..size-1, in order, in as few batches of at most `batch` as hold them, of nearly equal size.

    Equal, because a last batch of one or two items could not be split over the ranks.
    """
    count = -(-size // batch)
    return [list(range(size * i // count, size * (i + 1) // count)) for i in range(count)]
