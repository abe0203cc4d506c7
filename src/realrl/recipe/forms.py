"""Forms of records: fields, and the keys of a dataflow graph that they yield. `data/reader.py` reads them."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from realrl.config.errors import join

MOST_ANSWERS = 16
"""Most answers of a record of ranked answers."""


@dataclass(frozen=True)
class RecordForm:
    """Form of record."""

    keys: tuple[str, ...]
    """Keys of a graph that it yields."""
    fields: tuple[str, ...]
    """Fields of a record that the keys are made of."""
    other_fields: tuple[str, ...]
    """Fields of a record that is written another way: one that has a field of these that is not in `fields`."""
    variants: tuple[tuple[str, ...], ...] = ()
    """Fields of records in other usual ways, in order of precedence, which `data/variants.py` rewrites."""

    @property
    def accepted(self) -> str:
        """The fields that records may have, for error messages."""
        ways, variants = (
            [f"{{{', '.join(fields)}}}" for fields in dict.fromkeys(found)]
            for found in ((self.fields, self.other_fields), self.variants)
        )
        return join(ways, "or") + (f" ({join(variants, 'or')} will do)" if variants else "")

    def is_other(self, present: Collection[str]) -> bool:
        """Tell which way a record with these fields is written: with `other_fields`."""
        return any(field in present for field in self.other_fields if field not in self.fields)

    def fields_of(self, present: Collection[str]) -> tuple[str, ...]:
        """List the fields that keys are made of, in a record with these fields."""
        return self.other_fields if self.is_other(present) else self.fields


FORMS: Mapping[str, RecordForm] = MappingProxyType(
    {
        "answer": RecordForm(
            ("tokens", "loss_mask"),
            ("prompt", "answer"),
            ("messages",),
            (("prompt", "completion"), ("text",), ("conversations",), ("instruction", "output")),
        ),
        "pair": RecordForm(
            (
                "chosen",
                "rejected",
                "chosen_prompt_length",
                "rejected_prompt_length",
                "pairs_of_prompt",
                "margin",
                "ref_chosen_logps",
                "ref_rejected_logps",
            ),
            ("prompt", "chosen", "rejected"),
            ("prompt", "pos_answers", "neg_answers"),
            (("chosen", "rejected"),),
        ),
        "prompt": RecordForm(
            ("prompts",),
            ("prompt",),
            ("messages",),
            (("conversations",), ("instruction",), ("chosen", "rejected")),
        ),
        "label": RecordForm(
            ("tokens", "prompt_length", "label", "mismatched"),
            ("prompt", "completion", "label"),
            ("prompt", "chosen", "rejected"),
            (("chosen", "rejected"),),
        ),
        "ranked": RecordForm(
            tuple(f"answer_{i}" for i in range(MOST_ANSWERS)), ("prompt", "answers"), ("prompt", "answers")
        ),
        "steps": RecordForm(
            ("tokens", "step_ends", "step_labels"),
            ("prompt", "completions", "labels"),
            ("prompt", "completions", "labels"),
        ),
    }
)
"""Form of record by name.

`answer`: prompts with answers, or conversations. `pair`: preferred and other answers to one prompt. `label`:
prompts with a completion that is good or bad. `ranked`: answers to one prompt, the best first. `steps`: prompts
with a completion in steps, each right or wrong. `prompt`: prompts to generate from.
"""
