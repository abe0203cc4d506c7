"""Tokenised data sets."""

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from realrl.config.errors import UserError
from realrl.data.batch import Batch, Ragged
from realrl.data.forms import Item, Reader, further_fields, is_plain_text, plain_text_note
from realrl.data.further import FieldFilter, FurtherFields, keep_nothing
from realrl.data.mismatch import mismatch_completions
from realrl.data.numbers import Numbers, read_numbers, type_code
from realrl.data.origins import Origins
from realrl.data.records import read_records
from realrl.data.rejects import BadRecordError, Rejects
from realrl.data.tokenization import Row, find_excess, find_problem, make_field, tokenize
from realrl.data.variants import find_field, rename_fields, rewrite
from realrl.recipe.data import DataConfig
from realrl.recipe.sources import list_sources, name_sources

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

CHUNK = 4096
"""Items tokenised at a time: enough to keep the tokenizer's threads busy, few enough to stay small."""


@dataclass(frozen=True, kw_only=True)
class SourceCount:
    """Number of records and items of a source. Its items follow those of the source before it."""

    path: str
    weight: float
    """Passes over its items in an epoch."""
    items: int
    """Number of items that are used."""
    skipped: int
    """Number of records, or pairs made of a record, that were left out."""
    too_long: int
    """Number of them that are too long."""
    reasons: tuple[str, ...]
    """Reasons for the first few of them, each as FILE:LINE: message."""


Watch = Callable[[int, str, Sequence[Row]], None]
"""Function of the number of a source, and the origin, FILE:LINE, and rows of an item that is used."""


class Dataset:
    """All items of one or more sources, tokenised: one row of numbers per item for every source key of a graph."""

    def __init__(
        self,
        fields: dict[str, Ragged],
        *,
        sources: Sequence[SourceCount] = (),
        notes: Sequence[str] = (),
        further: Mapping[str, Sequence[Any]] | None = None,
        longest_mismatched: int | None = None,
        origins: Origins | None = None,
    ) -> None:
        """`fields`: rows per key, equally many for each. `longest_mismatched`: most tokens of the rows of the key
        `mismatched`, None where batches do not have it. The rest: see attributes."""
        self._fields = fields
        self._longest_mismatched = longest_mismatched
        self.further = dict(further or {})
        """Fields of the records that no key is made of, where they are kept: name -> a value per item, None where
        its record has no such field."""
        self.sources = tuple(sources)
        """Numbers of items by source, in the order in which they were read."""
        self._origins = origins or Origins()
        self.notes = tuple(notes)
        """Notes for the user on how the records were read."""

    def __len__(self) -> int:
        return len(next(iter(self._fields.values())))

    @property
    def skipped(self) -> int:
        """Number of records, or pairs made of a record, that were left out."""
        return sum(source.skipped for source in self.sources)

    @property
    def too_long(self) -> int:
        """Number of those that were left out because they are too long."""
        return sum(source.too_long for source in self.sources)

    @property
    def reasons(self) -> tuple[str, ...]:
        """Reasons for the first few of each source, each as FILE:LINE: message."""
        return tuple(reason for source in self.sources for reason in source.reasons)

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

    def list_origins(self, indices: Sequence[int]) -> list[str]:
        """List where the records of the items at `indices` come from, FILE:LINE; empty where that is not known."""
        return self._origins.list(indices)

    @classmethod
    def load(
        cls,
        source: Any,
        form: str,
        keys: tuple[str, ...],
        tokenizer: "PreTrainedTokenizerFast",
        config: DataConfig,
        seed: int,
        stop_token_ids: tuple[int, ...],
        keep: FieldFilter = keep_nothing,
        watch: Watch | None = None,
    ) -> "Dataset":
        """Read and tokenise `source` (see `list_sources`), records of `form`, into the rows that `keys` name.

        `stop_token_ids` are the ids that end a sequence, at least one. `keep` says which fields of records
        are kept that no key is made of; `watch` is called with each item. UserError where a source cannot be used,
        nothing of it is left, or, under `config.on_error=fail` and `config.on_too_long=fail`, at the first record
        that is malformed or too long.
        """
        columns, origins = _Columns(keys), Origins()
        notes = _Notes(tokenizer, config)
        reader = Reader(
            tokenizer=tokenizer,
            apply_chat_template=config.apply_chat_template,
            train_on=config.train_on,
            max_pairs=config.max_pairs_per_prompt,
            seed=seed,
            ranked=sum(key.startswith("answer_") for key in keys),
        )
        further, records, counts = FurtherFields(), _Records(config.columns), []
        for which, given in enumerate(list_sources(source)):
            rejects, before = Rejects(config.on_error, config.on_too_long), len(columns.records)
            items = records.items(given.path, form, reader, rejects, keep, keys)
            while chunk := list(islice(items, CHUNK)):
                rows = iter(
                    tokenize([text for *_, item in chunk for text in item], tokenizer, stop_token_ids)
                )
                for origin, record, plain, fields_kept, numbers, item in chunk:
                    item_rows = list(islice(rows, len(item)))
                    excess = find_excess(item_rows, config)
                    reason = excess or find_problem(item_rows, form)
                    if reason is not None:
                        rejects(origin, reason, too_long=excess is not None)
                        continue
                    columns.add(record, item_rows, numbers)
                    further.add(fields_kept)
                    origins.add(origin)
                    notes.add(origin, plain, item_rows)
                    if watch is not None:
                        watch(which, origin, item_rows)
            count = SourceCount(
                path=given.path,
                weight=given.weight,
                items=len(columns.records) - before,
                skipped=rejects.count,
                too_long=rejects.too_long,
                reasons=tuple(rejects.reasons),
            )
            _check_used(count)
            counts.append(count)
        fields = columns.fields(config.pair_weight)
        return cls(
            fields,
            sources=counts,
            notes=[*records.notes(name_sources(source)), *notes.result()],
            further=further.columns,
            longest_mismatched=config.max_tokens if "mismatched" in keys else None,
            origins=origins,
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


class _Records:
    """Records of all sources, numbered from one to the next."""

    def __init__(self, columns: Mapping[str, str]) -> None:
        self._columns = columns
        self._absent = set(columns)
        self._number = 0

    def items(
        self,
        source: str,
        form: str,
        reader: Reader,
        rejects: Rejects,
        keep: FieldFilter,
        keys: Sequence[str],
    ) -> Iterator[tuple[str, int, bool, dict[str, Any], Numbers, Item]]:
        """Yield each item with its origin, the number of its record, whether the record is plain text, the further
        fields of the record that are kept, and its numbers by key."""
        for origin, given in read_records(source, rejects):
            self._number += 1
            try:
                record = rewrite(form, self._rename(given))
                items = reader.read(form, record)
                numbers = read_numbers(record, form, keys, len(items))
            except BadRecordError as error:
                rejects(origin, str(error))
                continue
            kept = {name: value for name, value in further_fields(form, record).items() if keep(name)}
            for values, item in zip(numbers, items, strict=True):
                yield origin, self._number, is_plain_text(record), kept, values, item

    def _rename(self, record: dict[str, Any]) -> dict[str, Any]:
        self._absent -= {name for name in self._absent if find_field(record, name) is not None}
        return rename_fields(record, self._columns)

    def notes(self, sources: str) -> list[str]:
        """List the notes on columns that no record has."""
        return [
            f"data.columns: no record of {sources} has a field {theirs!r}" for theirs in sorted(self._absent)
        ]


def _check_used(source: SourceCount) -> None:
    """Check that a source has items that are used; else UserError."""
    if not source.items:
        all_skipped = f"all {source.skipped} were skipped, first {(*source.reasons, '')[0]}"
        why = all_skipped if source.skipped else "it is empty"
        raise UserError(f"no usable records in {source.path}: {why}")
