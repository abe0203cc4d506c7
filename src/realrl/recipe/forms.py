"""Forms of records: fields, and the keys of a dataflow graph that they yield. `data/forms.py` reads them."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class RecordForm:
    """Form of record."""

    keys: tuple[str, ...]
    """Keys of a graph that it yields."""
    fields: tuple[str, ...]
    """Fields of a record that the keys are made of."""
    other_fields: tuple[str, ...]
    """Fields of a record that is written another way: one that has a field of these that is not in `fields`."""

    @property
    def accepted(self) -> str:
        """The fields that records may have, for error messages."""
        return f"{{{', '.join(self.fields)}}} or {{{', '.join(self.other_fields)}}}"

    def is_other(self, present: Collection[str]) -> bool:
        """Tell which way a record with these fields is written: with `other_fields`."""
        return any(field in present for field in self.other_fields if field not in self.fields)

    def fields_of(self, present: Collection[str]) -> tuple[str, ...]:
        """List the fields that keys are made of, in a record with these fields."""
        return self.other_fields if self.is_other(present) else self.fields


FORMS: Mapping[str, RecordForm] = MappingProxyType(
    {
        "answer": RecordForm(("tokens", "loss_mask"), ("prompt", "answer"), ("messages",)),
        "pair": RecordForm(
            ("chosen", "rejected", "pairs_of_prompt"),
            ("prompt", "chosen", "rejected"),
            ("prompt", "pos_answers", "neg_answers"),
        ),
        "prompt": RecordForm(("prompts",), ("prompt",), ("messages",)),
    }
)
"""Form of record by name.

`answer`: prompts with answers, or conversations. `pair`: preferred and other answers to one prompt. `prompt`:
prompts to generate from.
"""
