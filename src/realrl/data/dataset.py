"""Tokenised data sets."""

import json
import zlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from realrl.config.errors import UserError
from realrl.data.batch import Batch, Ragged
from realrl.data.items import FLOATS, DataItem, FieldFilter, ItemReader
from realrl.data.records import RecordReader, read_records
from realrl.data.rejects import Rejects
from realrl.data.tokenization import Row, make_field
from realrl.data.turn_template import TurnTemplate
from realrl.recipe.data import DataConfig
from realrl.recipe.sources import RecordSource, list_sources, name_sources

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class Origins:
    """Origins of many items in few bytes: each file name is kept once."""

    def __init__(self) -> None:
        self._files: dict[str, int] = {}
        self._names: list[str] = []
        self._file = array("i")
        self._line = array("q")

    def add(self, origin: str) -> None:
        """Add an item's origin: FILE:LINE, or any other text."""
        file, _, line = origin.rpartition(":")
        known = line.isdecimal() and len(line) < 19
        name = file if known else origin
        if name not in self._files:
            self._files[name] = len(self._names)
            self._names.append(name)
        self._file.append(self._files[name])
        self._line.append(int(line) if known else -1)

    def list(self, indices: Sequence[int]) -> list[str]:
        """List the origins of the items at `indices`; empty if none were added."""
        return [self._text(i) for i in indices] if self._file else []

    def _text(self, item: int) -> str:
        name, line = self._names[self._file[item]], self._line[item]
        return name if line < 0 else f"{name}:{line}"


@dataclass(frozen=True, kw_only=True)
class SourceCount:
    """Number of records and items of a source. Sources follow each other in the data set."""

    path: str
    weight: float
    """Number of passes over the source's items in an epoch."""
    items: int
    """Number of used items."""
    skipped: int
    """Number of skipped records, or pairs of a record."""
    too_long: int
    """Number of skipped records that are too long."""
    reasons: tuple[str, ...]
    """Reasons for the first few skipped records, as FILE:LINE: message."""


Watch = Callable[[int, str, Sequence[Row]], None]
"""Function that is called for each used item with the number of its source, its origin (FILE:LINE) and rows."""


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
        template: int = 0,
    ) -> None:
        """`fields`: rows by key; all keys have the same number of rows. `longest_mismatched`: maximum tokens of a
        row of the key `mismatched`; None if batches do not have this key. `template`: checksum of the chat template
        and its arguments. For the other arguments, see the attributes."""
        self._fields = fields
        self._longest_mismatched = longest_mismatched
        self.further = dict(further or {})
        """Extra columns on this rank: name -> one value per item, None if the item's record lacks the field."""
        self.sources = tuple(sources)
        """Counts of each source, in order."""
        self._origins = origins or Origins()
        self._template = template
        self.notes = tuple(notes)
        """Notes for the user on the reading of records."""

    def __len__(self) -> int:
        return len(next(iter(self._fields.values())))

    @property
    def skipped(self) -> int:
        return sum(source.skipped for source in self.sources)

    @property
    def too_long(self) -> int:
        return sum(source.too_long for source in self.sources)

    @property
    def reasons(self) -> tuple[str, ...]:
        """Reasons for the first few skipped records of each source, as FILE:LINE: message."""
        return tuple(reason for source in self.sources for reason in source.reasons)

    def identify(self) -> dict[str, int]:
        """Identify the items and their order by the number of items, and by checksums of rows and chat template."""
        checksum = 0
        for key in sorted(self._fields):
            rows = self._fields[key]
            for part in (np.array(rows.lengths, dtype=np.int64), rows.values.numpy()):
                checksum = zlib.crc32(np.ascontiguousarray(part).data.cast("B"), checksum)
        return {"items": len(self), "crc32": checksum, "chat_template": self._template}

    def identify_further(self) -> dict[str, int]:
        """Compute a checksum of each extra column that is kept on this rank."""
        found = {}
        for name, values in self.further.items():
            checksum = 0
            for value in values:
                checksum = zlib.crc32(json.dumps(value, sort_keys=True, default=repr).encode(), checksum)
            found[name] = checksum
        return found

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
        """Select the extra columns of the items at `indices`: name -> a value per item."""
        return {name: [values[i] for i in indices] for name, values in self.further.items()}

    def list_origins(self, indices: Sequence[int]) -> list[str]:
        """List the origins, FILE:LINE, of the items at `indices`; empty if unknown."""
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
        keep: FieldFilter = lambda name: False,
        watch: Watch | None = None,
        read: RecordReader = read_records,
        turns: TurnTemplate | None = None,
    ) -> "Dataset":
        """Read and tokenise `source` (see `list_sources`), records of `form`, into the rows that `keys` name.

        `stop_token_ids`: at least one id that ends a sequence. `keep` decides which extra columns are kept. `watch`
        is called for each item. `read` reads the records of a source. `turns` writes the turns of an environment,
        if there is one. Raises UserError if a source cannot be used or has no usable record. With
        `config.on_error=fail` or `config.on_too_long=fail`, the first malformed or too long record also raises
        UserError.
        """
        columns, counts = _Columns(keys), []
        reader = ItemReader(form, keys, tokenizer, config, seed, stop_token_ids, keep, read, turns)
        for which, given in enumerate(list_sources(source)):
            rejects, before = Rejects(config.on_error, config.on_too_long), len(columns.records)
            for item in reader.read(given.path, rejects):
                columns.add(item)
                if watch is not None:
                    watch(which, item.origin, item.rows)
            counts.append(_count(given, len(columns.records) - before, rejects))
        return cls(
            columns.fields(config.pair_weight),
            sources=counts,
            notes=reader.notes(name_sources(source)),
            further=columns.further,
            longest_mismatched=config.max_tokens if "mismatched" in keys else None,
            origins=columns.origins,
            template=zlib.crc32(json.dumps([tokenizer.chat_template, config.chat_template_kwargs]).encode()),
        )


class _Columns:
    """Rows of every source key, extra columns and origins. `add` appends one item."""

    def __init__(self, keys: tuple[str, ...]) -> None:
        self.records = array("q")
        """Number of each item's record."""
        self.origins = Origins()
        self.further: dict[str, list[Any]] = {}
        """Extra columns: name -> one value per item, None if the item's record lacks the field.

        Items of one record share references, and no record is kept as a whole."""
        self._weighted = "pairs_of_prompt" in keys
        made_later = ("pairs_of_prompt", "mismatched")
        self._values: dict[str, array[Any]] = {
            key: array("f" if key in FLOATS else "i") for key in keys if key not in made_later
        }
        self._lengths: dict[str, list[int]] = {key: [] for key in self._values}

    def add(self, item: DataItem) -> None:
        for name in item.further.keys() - self.further.keys():
            self.further[name] = [None] * len(self.records)
        for name, column in self.further.items():
            column.append(item.further.get(name))
        self.records.append(item.record)
        self.origins.add(item.origin)
        for key, values in self._values.items():
            row = item.numbers[key] if key in item.numbers else make_field(key, item.rows)
            values.extend(row)
            self._lengths[key].append(len(row))

    def fields(self, pair_weight: Literal["pair", "prompt"]) -> dict[str, Ragged]:
        """Collect all rows by key.

        `pairs_of_prompt` is 1 or, if prompts have equal weight, the number of the prompt's items.
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


def _count(source: RecordSource, items: int, rejects: Rejects) -> SourceCount:
    """Count the items of a source. Raises UserError if none is used."""
    if not items:
        if not rejects.count:
            raise UserError(f"no usable records in {source.path}: it is empty")
        first = (*rejects.reasons, "")[0]
        raise UserError(f"none of the {rejects.count} records of {source.path} can be used; first {first}")
    return SourceCount(
        path=source.path,
        weight=source.weight,
        items=items,
        skipped=rejects.count,
        too_long=rejects.too_long,
        reasons=tuple(rejects.reasons),
    )


def mismatch_completions(tokens: Ragged, prompt_length: Ragged, longest: int) -> Ragged:
    """Join each prompt with the previous item's completion, and the first prompt with the last completion.

    KTO estimates its divergence from these rows (Ethayarajh et al. 2024, section 4.1). The rows depend only on the
    items of the step, not on which rank has an item. Rows are cut off at `longest` tokens.
    """
    starts = prompt_length.values.tolist()
    prompts = [row[:start] for row, start in zip(tokens.rows(), starts, strict=True)]
    completions = [row[start:] for row, start in zip(tokens.rows(), starts, strict=True)]
    before = [completions[-1], *completions[:-1]] if completions else []
    rows = ([*prompt, *completion][:longest] for prompt, completion in zip(prompts, before, strict=True))
    return Ragged.of(rows, dtype=tokens.values.dtype)
