"""Items of a data set: records renamed, read and tokenised."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import isfinite
from typing import TYPE_CHECKING, Any

from realrl.config.errors import UserError
from realrl.data.chat_template import ChatTemplate, Conversation
from realrl.data.record_forms import Item, Reader, drops_nulls, further_fields, is_plain_text, plain_text_note
from realrl.data.records import RecordReader, read_records
from realrl.data.rejects import BadRecordError, Rejects
from realrl.data.tokenization import Row, cut_rows, find_excess, find_problem, tokenize
from realrl.data.tools import read_template_options
from realrl.data.turn_template import TurnTemplate
from realrl.data.variants import find_field, rename_fields, rewrite
from realrl.recipe.data import DataConfig
from realrl.recipe.forms import FORMS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


FieldFilter = Callable[[str], bool]
"""Function that returns whether a column is kept."""

NumberRows = Mapping[str, Sequence[float]]
"""Rows of numbers of one item, by key."""

FLOATS = ("margin", "ref_chosen_logps", "ref_rejected_logps")
"""Keys with one float per item, which is in the record's field of the same name."""


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
    texts = {"true": 1, "false": 0, "1": 1, "0": 0}  # tables from pandas may hold such text
    if isinstance(value, str) and value.lower() in texts:
        return texts[value.lower()]
    raise BadRecordError(f"field {field!r} must be true or false, or 1 or 0, not {value!r}")


CHUNK = 4096
"""Number of items tokenised at a time: enough to keep the tokenizer's threads busy, but with little memory."""


@dataclass(kw_only=True, slots=True)
class DataItem:
    """Item of a data set."""

    origin: str
    """Origin of the item's record, FILE:LINE."""
    record: int
    """Number of the item's record among the records of all sources."""
    plain: bool
    """Whether the record is plain text, not a conversation."""
    further: Mapping[str, Any]
    """Kept fields of the record that no key is made from."""
    numbers: NumberRows
    """Rows of numbers that come directly from the record, by key."""
    texts: Item
    """Texts to tokenise."""
    rows: Sequence[Row] = ()
    """Tokens of each text."""


class ItemReader:
    """Reader of the items of sources, one source after the other. For the arguments, see `Dataset.load`."""

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
        turns: TurnTemplate | None = None,
    ) -> None:
        opening = None if turns is None else turns.template
        if opening is not None:
            # An environment answers in messages, so the prompt is a message, too.
            config = config.model_copy(update={"apply_chat_template": True})
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
        self._turns = turns
        self._reader = Reader(
            template=ChatTemplate(tokenizer, options) if opening is None else opening,
            apply_chat_template=config.apply_chat_template,
            train_on=config.train_on,
            max_pairs=config.max_pairs_per_prompt,
            seed=seed,
            ranked=sum(key.startswith("answer_") for key in keys),
        )
        self._absent = set(config.columns)
        self._number = 0

    def read(self, source: str, rejects: Rejects) -> Iterator[DataItem]:
        """Yield the usable items of a source. Other items go to `rejects`."""
        items = self._read_texts(source, rejects)
        while chunk := list(islice(items, CHUNK)):
            texts = [text for item in chunk for text in item.texts]
            rows = iter(tokenize(texts, self._tokenizer, self._stop_token_ids))
            for item in chunk:
                item.rows = list(islice(rows, len(item.texts)))
                excess = find_excess(item.rows, self._config)
                cut = self._cuts(item) and excess is not None
                if cut:
                    item.rows = cut_rows(item.rows, self._config, self._tokenizer.bos_token_id)
                    excess = find_excess(item.rows, self._config)
                reason = excess or find_problem(item.rows, self._form)
                if reason is not None:
                    rejects(item.origin, reason, too_long=cut or excess is not None)
                    continue
                self._note(item, cut)
                yield item

    def _note(self, item: DataItem, cut: bool) -> None:
        seen = {
            "plain": item.plain,
            "joined": any(row.joined for row in item.rows),
            "cut": cut,
            "blank": self._form == "prompt" and _is_blank(item),
        }
        for what, found in seen.items():
            if found:
                self._notes.see(what, item.origin)

    def _cuts(self, item: DataItem) -> bool:
        """Check whether an item is cut if it is too long.

        Answers in steps are not cut, because each step has a label. Items with log-probabilities of a reference are
        not cut, because these log-probabilities belong to all tokens.
        """
        whole = self._form == "steps" or any(name.startswith("ref_") for name in item.numbers)
        return self._config.on_too_long in ("keep_start", "keep_end") and not whole

    def _read_texts(self, source: str, rejects: Rejects) -> Iterator[DataItem]:
        for origin, given in self._read_records(source, rejects):
            self._number += 1
            try:
                record = rewrite(self._form, self._rename(given))
                if self._turns is not None:
                    self._turns.check_record(record)
                items = self._reader.read(self._form, record)
                numbers = read_numbers(record, self._form, self._keys, len(items))
            except BadRecordError as error:
                rejects(origin, str(error))
                continue
            if drops_nulls(record, self._config.apply_chat_template):
                self._notes.see("nulls", origin)
            if self._form == "answer" and len(items) > 1:
                self._notes.see("parted", origin)
                self._notes.parts += len(items)
            further = further_fields(self._form, record)
            if self._turns is not None and self._turns.takes_prompt:
                further = {"prompt": record["messages" if "messages" in record else "prompt"], **further}
            kept = {name: value for name, value in further.items() if self._keep(name)}
            for values, texts in zip(numbers, items, strict=True):
                yield DataItem(
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
        """List the notes on all records that were read so far. `sources`: name of the sources in messages."""
        absent = [
            f"data.columns: no record of {sources} has a field {name!r}" for name in sorted(self._absent)
        ]
        return [*absent, *self._notes.result()]


class _Notes:
    """Notes on records that can be read in more than one way."""

    def __init__(self, tokenizer: "PreTrainedTokenizerFast", config: DataConfig) -> None:
        self._tokenizer, self._config = tokenizer, config
        self._counts: Counter[str] = Counter()
        self._first: dict[str, str] = {}
        """Origin of the first record that each kind of note is about."""
        self.parts = 0
        """Number of sequences from conversations that became several sequences."""

    def see(self, what: str, origin: str) -> None:
        self._counts[what] += 1
        self._first.setdefault(what, origin)

    def result(self) -> list[str]:
        """List the notes, one message each."""
        counts, applied = self._counts, self._config.apply_chat_template
        plain = plain_text_note(self._tokenizer, applied, "data.apply_chat_template=true")
        notes = {
            "plain": plain,
            "joined": (
                "the tokenizer cuts the end of the prompt differently once the answer follows in"
                f" {counts['joined']} conversations, first {{}}: generation starts from other tokens than training"
            ),
            "parted": (
                f"the chat template writes turns differently once others follow, so {counts['parted']:,}"
                f" conversations became {self.parts:,} sequences, one for each answer to learn, first {{}}"
            ),
            "nulls": (
                "nulls in tools and in calls of tools are dropped; tables have them for keys of other rows;"
                " first {}"
            ),
            "cut": (
                f"{counts['cut']:,} items were cut to data.max_tokens and data.max_prompt_tokens"
                f" (data.on_too_long={self._config.on_too_long}), first {{}}"
            ),
            "blank": f"{counts['blank']:,} prompts are blank, first {{}}",
        }
        seen = ((note, self._first[what]) for what, note in notes.items() if what in self._first)
        return [note.replace("{}", first) for note, first in seen if note is not None]


def _is_blank(item: DataItem) -> bool:
    """Check whether a prompt is only white space. In a conversation, the last turn of the prompt counts."""
    (text,) = item.texts
    return not (text.last if isinstance(text, Conversation) else text.prompt).strip()
