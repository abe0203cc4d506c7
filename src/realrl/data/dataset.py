"""Tokenised data sets, and the order in which a run reads them."""

import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from realrl.config.errors import UserError
from realrl.data.batch import Batch, Ragged
from realrl.data.forms import READERS, Item, Reader, further_fields, is_plain_text, plain_text_note
from realrl.data.further import FieldFilter, FurtherFields, keep_nothing
from realrl.data.mismatch import mismatch_completions
from realrl.data.numbers import Numbers, read_numbers, type_code
from realrl.data.records import read_records
from realrl.data.rejects import BadRecordError, Rejects
from realrl.data.shuffle import permute
from realrl.data.tokenization import Row, find_problem, make_field, tokenize
from realrl.recipe.data import DataConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

CHUNK = 4096
"""Items tokenised at a time: enough to keep the tokenizer's threads busy, few enough to stay small."""


class Dataset:
    """All items of a source, tokenised: one row of numbers per item for every source key of a graph."""

    def __init__(
        self,
        fields: dict[str, Ragged],
        *,
        skipped: int = 0,
        reasons: Sequence[str] = (),
        notes: Sequence[str] = (),
        further: Mapping[str, Sequence[Any]] | None = None,
        longest_mismatched: int | None = None,
    ) -> None:
        """`fields`: rows per key, equally many for each. `longest_mismatched`: most tokens of the rows of the key
        `mismatched`, None where batches do not have it. The rest: see attributes."""
        self._fields = fields
        self._longest_mismatched = longest_mismatched
        self.further = dict(further or {})
        """Fields of the records that no key is made of, where they are kept: name -> a value per item, None where
        its record has no such field."""
        self.skipped = skipped
        """Number of records, or pairs made of a record, that were left out."""
        self.reasons = tuple(reasons)
        """Reasons for the first few of them, each as FILE:LINE: message."""
        self.notes = tuple(notes)
        """Notes for the user on how the records were read."""

    def __len__(self) -> int:
        return len(next(iter(self._fields.values())))

    def batch(self, indices: Sequence[int]) -> Batch:
        """Make a batch of the items at `indices`, with ids 0, 1, 2, ... and int64 or float32 rows."""
        rows = {key: rows.select(indices) for key, rows in self._fields.items()}
        fields = {
            key: chosen if chosen.values.is_floating_point() else Ragged(chosen.values.long(), chosen.lengths)
            for key, chosen in rows.items()
        }
        if self._longest_mismatched is not None:
            fields["mismatched"] = mismatch_completions(
                fields["tokens"], fields["prompt_length"], self._longest_mismatched
            )
        return Batch(tuple(range(len(indices))), fields)

    def further_fields(self, indices: Sequence[int]) -> dict[str, list[Any]]:
        """Select the further fields of the items at `indices`: name -> a value per item."""
        return {name: [values[i] for i in indices] for name, values in self.further.items()}

    @classmethod
    def load(
        cls,
        source: str,
        form: str,
        keys: tuple[str, ...],
        tokenizer: "PreTrainedTokenizerFast",
        config: DataConfig,
        seed: int,
        stop_token_ids: tuple[int, ...],
        keep: FieldFilter = keep_nothing,
    ) -> "Dataset":
        """Read and tokenise `source` (see `read_records`), records of `form`, into the rows that `keys` name.

        `stop_token_ids` are the ids that end a sequence, at least one. `keep` says which fields of records
        are kept that no key is made of. UserError where the source cannot be used, nothing is left, or, under
        `config.on_error=fail`, at the first record that is malformed or too long.
        """
        rejects = Rejects(config.on_error)
        columns = _Columns(keys)
        notes = _Notes(tokenizer, config)
        reader = Reader(
            tokenizer=tokenizer,
            apply_chat_template=config.apply_chat_template,
            train_on=config.train_on,
            max_pairs=config.max_pairs_per_prompt,
            seed=seed,
            ranked=sum(key.startswith("answer_") for key in keys),
        )
        items, further = _items(source, form, reader, rejects, keep, keys), FurtherFields()
        while chunk := list(islice(items, CHUNK)):
            rows = iter(tokenize([text for *_, item in chunk for text in item], tokenizer, stop_token_ids))
            for origin, record, plain, fields_kept, numbers, item in chunk:
                item_rows = list(islice(rows, len(item)))
                reason = find_problem(item_rows, config, form)
                if reason is not None:
                    rejects(origin, reason)
                    continue
                columns.add(record, item_rows, numbers)
                further.add(fields_kept)
                notes.add(origin, plain, item_rows)
        if not columns.records:
            why = (
                f"all {rejects.count} were skipped, first {rejects.reasons[0]}"
                if rejects.count
                else "it is empty"
            )
            raise UserError(f"no usable records in {source}: {why}")
        fields = columns.fields(config.pair_weight)
        return cls(
            fields,
            skipped=rejects.count,
            reasons=rejects.reasons,
            notes=notes.result(),
            further=further.columns,
            longest_mismatched=config.max_tokens if "mismatched" in keys else None,
        )


class _Columns:
    """Rows of every source key, appended as they are read."""

    def __init__(self, keys: tuple[str, ...]) -> None:
        self.records = array("q")
        """Record of each item."""
        self._weighted = "pairs_of_prompt" in keys
        made_later = ("pairs_of_prompt", "mismatched")
        self._values: dict[str, array[Any]] = {
            key: array(type_code(key)) for key in keys if key not in made_later
        }
        self._lengths: dict[str, list[int]] = {key: [] for key in self._values}

    def add(self, record: int, rows: Sequence[Row], numbers: Numbers) -> None:
        """Add an item of the `record`-th record."""
        self.records.append(record)
        for key, values in self._values.items():
            row = numbers[key] if key in numbers else make_field(key, rows)
            values.extend(row)
            self._lengths[key].append(len(row))

    def fields(self, pair_weight: Literal["pair", "prompt"]) -> dict[str, Ragged]:
        """Collect all rows by key.

        `pairs_of_prompt` is 1 or, where prompts weigh the same, the number of items of the prompt.
        """
        fields = {
            key: Ragged(torch.from_numpy(np.array(values)), tuple(self._lengths[key]))
            for key, values in self._values.items()
        }
        if self._weighted:
            _, which, counts = np.unique(np.array(self.records), return_inverse=True, return_counts=True)
            pairs = counts[which] if pair_weight == "prompt" else np.ones(len(which), dtype=np.int64)
            fields["pairs_of_prompt"] = Ragged.scalars(torch.from_numpy(pairs))
        return fields


class _Notes:
    """Notes on records that can be read in more than one way."""

    def __init__(self, tokenizer: "PreTrainedTokenizerFast", config: DataConfig) -> None:
        self._tokenizer = tokenizer
        self._applied = config.apply_chat_template
        self._plain = False
        self._joined = 0
        self._first_joined = ""

    def add(self, origin: str, plain: bool, rows: Sequence[Row]) -> None:
        """Register an item of a record of `plain` text or of a conversation."""
        self._plain = self._plain or plain
        if any(row.joined for row in rows):
            self._first_joined = self._first_joined or origin
            self._joined += 1

    def result(self) -> list[str]:
        """List the notes, one message each."""
        option = "data.apply_chat_template=true"
        notes = [plain_text_note(self._tokenizer, self._applied, option)] if self._plain else []
        if self._joined:
            notes.append(
                f"the tokenizer cuts the end of the prompt differently once the answer follows in {self._joined} "
                f"conversations, first {self._first_joined}: generation starts from other tokens than training"
            )
        return [note for note in notes if note is not None]


def _items(
    source: str, form: str, reader: Reader, rejects: Rejects, keep: FieldFilter, keys: Sequence[str]
) -> Iterator[tuple[str, int, bool, dict[str, Any], Numbers, Item]]:
    """Yield each item with its origin, the number of its record, whether the record is plain text, the further
    fields of the record that are kept, and its numbers by key."""
    for number, (origin, record) in enumerate(read_records(source, rejects)):
        try:
            items = READERS[form](reader, record)
            numbers = read_numbers(record, form, keys, len(items))
        except BadRecordError as error:
            rejects(origin, str(error))
            continue
        kept = {name: value for name, value in further_fields(form, record).items() if keep(name)}
        for values, item in zip(numbers, items, strict=True):
            yield origin, number, is_plain_text(record), kept, values, item


class Order:
    """Order of items in training: permutations of the data set, one per epoch, laid end to end, cut into batches.

    A function of the seed and the step alone.
    """

    def __init__(self, size: int, batch: int, seed: int, shuffle: bool = True) -> None:
        """Prepare the order; UserError where a batch is larger than the data set."""
        if batch > size:
            raise UserError(f"data.batch={batch} is more than the {size} records of the training data")
        self.size = size
        self.batch = batch
        self.seed = seed
        self.shuffle = shuffle
        self._cached: tuple[int, np.ndarray] | None = None

    def steps(self, epochs: float) -> int:
        """Count the steps in which every item is taken at least `epochs` times."""
        return math.ceil(epochs * self.size / self.batch - 1e-9)

    def indices(self, step: int) -> list[int]:
        """List the items of a step, counted from 0.

        These are `batch` indices; one may recur only where two epochs meet.
        """
        first = step * self.batch
        epoch, offset = divmod(first, self.size)
        head = self._epoch(epoch)[offset : offset + self.batch]
        rest = self.batch - len(head)
        return [*head.tolist(), *(self._epoch(epoch + 1)[:rest].tolist() if rest else ())]

    def _epoch(self, epoch: int) -> np.ndarray:
        if not self.shuffle:
            return np.arange(self.size)
        if self._cached is None or self._cached[0] != epoch:
            self._cached = epoch, permute(self.size, seed=self.seed, stream=epoch)
        return self._cached[1]


def split_eval_batches(size: int, batch: int) -> list[list[int]]:
    """Divide items 0..size-1, in order, into the fewest batches of at most `batch`, of nearly equal size.

    Equal, because a last batch of one or two items could not be split over the ranks.
    """
    count = -(-size // batch)
    return [list(range(size * i // count, size * (i + 1) // count)) for i in range(count)]
