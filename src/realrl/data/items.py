"""Items of a data set: records renamed, read and tokenised."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import isfinite
from typing import TYPE_CHECKING, Any

from realrl.config.errors import UserError
from realrl.data.conversation import Conversation
from realrl.data.record_forms import Item, Reader, further_fields, is_plain_text, plain_text_note
from realrl.data.records import RecordReader, read_records
from realrl.data.rejects import BadRecordError, Rejects
from realrl.data.tokenization import Row, cut_rows, find_excess, find_problem, tokenize
from realrl.data.tools import read_template_options
from realrl.data.variants import find_field, rename_fields, rewrite
from realrl.recipe.data import DataConfig
from realrl.recipe.forms import FORMS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


FieldFilter = Callable[[str], bool]
"""Tells whether a column is kept."""


def keep_nothing(name: str) -> bool:
    """Keep no column."""
    return False


class FurtherFields:
    """Extra columns: fields of records that no key is made of, such as a reference answer. Functions see them.

    A column has a value per item. Items of one record share references, and no record is kept as a whole.
    """

    def __init__(self) -> None:
        self.columns: dict[str, list[Any]] = {}
        self._items = 0

    def add(self, fields: Mapping[str, Any]) -> None:
        """Add an item with these fields; missing columns are None."""
        for name in fields.keys() - self.columns.keys():
            self.columns[name] = [None] * self._items
        for name, column in self.columns.items():
            column.append(fields.get(name))
        self._items += 1


NumberRows = Mapping[str, Sequence[float]]
"""Row of an item by key."""

FLOATS = ("margin", "ref_chosen_logps", "ref_rejected_logps")
"""Keys with a float per item; the record's field has the key's name."""


def type_code(key: str) -> str:
    """Find the type code of `array` for the rows of a key."""
    return "f" if key in FLOATS else "i"


def read_numbers(
    record: Mapping[str, Any], form: str, keys: Collection[str], items: int
) -> list[dict[str, Sequence[float]]]:
    """Read the numbers among `keys` for each of the `items` of a record.

    Raises BadRecordError if a field is missing or not a number of its kind.
    """
    rows: dict[str, list[Sequence[float]]] = {}
    for key in FLOATS:
        if key in keys:
            rows[key] = [[_float(record, key, form)]] * items
    if "label" in keys:
        other = FORMS[form].is_other(record)
        rows["label"] = [[1], [0]] * (items // 2) if other else [[_label(record["label"], "label")]]
    if "step_labels" in keys:
        rows["step_labels"] = [[_label(label, "labels") for label in record["labels"]]]
    return [{key: of[i] for key, of in rows.items()} for i in range(items)]


def _float(record: Mapping[str, Any], field: str, form: str) -> float:
    if FORMS[form].is_other(record):
        raise BadRecordError(
            f"field {field!r} is a number of one pair; write the record as"
            f" {{{', '.join((*FORMS[form].fields, field))}}}"
        )
    if field not in record:
        present = ", ".join(record) or "none"
        raise BadRecordError(f"no field {field!r} (fields: {present}), which the recipe asks for")
    value = record[field]
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        raise BadRecordError(f"field {field!r} must be a finite number, not {value!r}")
    return float(value)


def _label(value: Any, field: str) -> int:
    if isinstance(value, bool) or value in (0, 1):
        return int(value)
    texts = {"true": 1, "false": 0, "1": 1, "0": 0}  # pandas writes such tables of text
    if isinstance(value, str) and value.lower() in texts:
        return texts[value.lower()]
    raise BadRecordError(f"field {field!r} must be true or false, or 1 or 0, not {value!r}")


CHUNK = 4096
"""Items tokenised at a time: enough to keep the tokenizer's threads busy, few enough to stay small."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TextItem:
    """Item before tokenization."""

    origin: str
    """Origin of its record, FILE:LINE."""
    record: int
    """Number of its record among those of all sources."""
    plain: bool
    """Whether the record is plain text, no conversation."""
    further: Mapping[str, Any]
    """Fields of the record that no key is made of and that are kept."""
    numbers: NumberRows
    """Numbers that the record holds as they are, by key."""
    texts: Item
    """Texts to tokenise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenItem:
    """Item as it is used; fields as of `TextItem`."""

    origin: str
    record: int
    further: Mapping[str, Any]
    numbers: NumberRows
    rows: Sequence[Row]
    """Tokens of each text."""


class ItemReader:
    """Reader of the items of sources, one source after the other. Arguments as of `Dataset.load`."""

    def __init__(
        self,
        form: str,
        keys: Sequence[str],
        tokenizer: "PreTrainedTokenizerFast",
        config: DataConfig,
        seed: int,
        stop_token_ids: tuple[int, ...],
        keep: FieldFilter,
        read: RecordReader = read_records,
    ) -> None:
        self._form = form
        self._keys = keys
        self._tokenizer = tokenizer
        self._config = config
        self._stop_token_ids = stop_token_ids
        self._keep = keep
        self._read_records = read
        self._notes = _Notes(tokenizer, config)
        try:
            options = read_template_options({"chat_template_kwargs": config.chat_template_kwargs})
        except BadRecordError as error:
            raise UserError(f"data.chat_template_kwargs: {error}") from None
        self._reader = Reader(
            tokenizer=tokenizer,
            apply_chat_template=config.apply_chat_template,
            train_on=config.train_on,
            max_pairs=config.max_pairs_per_prompt,
            seed=seed,
            ranked=sum(key.startswith("answer_") for key in keys),
            template_options=options,
            notice_nulls=self._notes.see_nulls,
        )
        self._absent = set(config.columns)
        self._number = 0

    def read(self, source: str, rejects: Rejects) -> Iterator[TokenItem]:
        """Yield the items of a source that can be used; others go to `rejects`."""
        items = self._read_texts(source, rejects)
        while chunk := list(islice(items, CHUNK)):
            texts = [text for item in chunk for text in item.texts]
            rows = iter(tokenize(texts, self._tokenizer, self._stop_token_ids))
            for item in chunk:
                item_rows: Sequence[Row] = list(islice(rows, len(item.texts)))
                cut = self._cuts(item) and find_excess(item_rows, self._config) is not None
                if cut:
                    item_rows = cut_rows(item_rows, self._config, self._tokenizer.bos_token_id)
                excess = find_excess(item_rows, self._config)
                reason = excess or find_problem(item_rows, self._form)
                if reason is not None:
                    rejects(item.origin, reason, too_long=cut or excess is not None)
                    continue
                self._notes.add(item, item_rows, cut=cut, blank=self._form == "prompt" and _is_blank(item))
                yield TokenItem(
                    origin=item.origin,
                    record=item.record,
                    further=item.further,
                    numbers=item.numbers,
                    rows=item_rows,
                )

    def _cuts(self, item: TextItem) -> bool:
        """Check whether an item that is too long is cut.

        Steps have a label each, and log-probabilities of a reference are those of all tokens.
        """
        whole = self._form == "steps" or any(name.startswith("ref_") for name in item.numbers)
        return self._config.on_too_long in ("keep_start", "keep_end") and not whole

    def _read_texts(self, source: str, rejects: Rejects) -> Iterator[TextItem]:
        for origin, given in self._read_records(source, rejects):
            self._number += 1
            self._notes.origin = origin
            try:
                record = rewrite(self._form, self._rename(given))
                items = self._reader.read(self._form, record)
                numbers = read_numbers(record, self._form, self._keys, len(items))
            except BadRecordError as error:
                rejects(origin, str(error))
                continue
            if self._form == "answer" and len(items) > 1:
                self._notes.see_parts(len(items))
            further = further_fields(self._form, record)
            kept = {name: value for name, value in further.items() if self._keep(name)}
            for values, texts in zip(numbers, items, strict=True):
                yield TextItem(
                    origin=origin,
                    record=self._number,
                    plain=is_plain_text(record),
                    further=kept,
                    numbers=values,
                    texts=texts,
                )

    def _rename(self, record: dict[str, Any]) -> dict[str, Any]:
        self._absent -= {name for name in self._absent if find_field(record, name) is not None}
        return rename_fields(record, self._config.columns)

    def notes(self, sources: str) -> list[str]:
        """List the notes on what was read so far of `sources`, as they are called in messages."""
        absent = [
            f"data.columns: no record of {sources} has a field {name!r}" for name in sorted(self._absent)
        ]
        return [*absent, *self._notes.result()]


class _Notes:
    """Notes on records that can be read in more than one way."""

    def __init__(self, tokenizer: "PreTrainedTokenizerFast", config: DataConfig) -> None:
        self._tokenizer = tokenizer
        self._applied, self._on_too_long = config.apply_chat_template, config.on_too_long
        self.origin = ""
        """Origin of the record that is read."""
        self._plain = False
        self._joined = 0
        self._first_joined = ""
        self._nulls: list[str] = []  # origins, of which only the first is kept
        self._cut: list[str] = []
        self._blank: list[str] = []
        self._parted, self._parts, self._first_parted = 0, 0, ""

    def see_nulls(self) -> None:
        """Register a record whose tools have nulls."""
        self._nulls = self._nulls or [self.origin]

    def see_parts(self, parts: int) -> None:
        """Register a conversation that became several sequences."""
        self._first_parted = self._first_parted or self.origin
        self._parted += 1
        self._parts += parts

    def add(self, item: TextItem, rows: Sequence[Row], *, cut: bool, blank: bool) -> None:
        """Register an item that is used; `cut`: because it was too long, `blank`: it is a prompt without a word."""
        self._plain = self._plain or item.plain
        if any(row.joined for row in rows):
            self._first_joined = self._first_joined or item.origin
            self._joined += 1
        self._cut += [item.origin] * cut
        self._blank += [item.origin] * blank

    def result(self) -> list[str]:
        """List the notes, one message each."""
        option = "data.apply_chat_template=true"
        notes = [plain_text_note(self._tokenizer, self._applied, option)] if self._plain else []
        if self._joined:
            notes.append(
                f"the tokenizer cuts the end of the prompt differently once the answer follows in {self._joined} "
                f"conversations, first {self._first_joined}: generation starts from other tokens than training"
            )
        if self._parted:
            notes.append(
                f"the chat template writes turns differently once others follow, so {self._parted:,} conversations"
                f" became {self._parts:,} sequences, one for each answer to learn, first {self._first_parted}"
            )
        if self._nulls:
            notes.append(
                "nulls in tools and in calls of tools are dropped; tables have them for keys of other rows; first "
                + self._nulls[0]
            )
        if self._cut:
            notes.append(
                f"{len(self._cut):,} items were cut to data.max_tokens and data.max_prompt_tokens"
                f" (data.on_too_long={self._on_too_long}), first {self._cut[0]}"
            )
        if self._blank:
            notes.append(f"{len(self._blank):,} prompts are blank, first {self._blank[0]}")
        return [note for note in notes if note is not None]


def _is_blank(item: TextItem) -> bool:
    """Check whether a prompt says nothing: text without a word, or a last turn without one."""
    (text,) = item.texts
    return not (text.last if isinstance(text, Conversation) else text.prompt).strip()
