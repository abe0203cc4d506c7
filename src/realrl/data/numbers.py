"""Numbers of items that records hold as they are: margins, labels, log-probabilities of a reference."""

from collections.abc import Collection, Mapping, Sequence
from math import isfinite
from typing import Any

from realrl.data.sources.rejects import BadRecordError
from realrl.recipe.forms import FORMS

NumberRows = Mapping[str, Sequence[float]]
"""Row of an item by key."""

FLOATS = ("margin", "ref_chosen_logps", "ref_rejected_logps")
"""Keys with a number per item that is not whole; the field of a record has the key's name."""


def type_code(key: str) -> str:
    """Find the type in which rows of a key are kept, as of `array`."""
    return "f" if key in FLOATS else "i"


def read_numbers(
    record: Mapping[str, Any], form: str, keys: Collection[str], items: int
) -> list[dict[str, Sequence[float]]]:
    """Read the numbers of each of the `items` that a record of a form makes, of those `keys` that are such.

    BadRecordError where a field is missing or is no number of its kind.
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
    texts = {"true": 1, "false": 0, "1": 1, "0": 0}  # tables of text, as pandas writes them
    if isinstance(value, str) and value.lower() in texts:
        return texts[value.lower()]
    raise BadRecordError(f"field {field!r} must be true or false, or 1 or 0, not {value!r}")
