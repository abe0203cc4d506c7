"""Forms of records: their fields, and the keys of a dataflow graph that they yield.

`data/record_forms.py` reads records of these forms.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from realrl.config.errors import join

MOST_ANSWERS = 16
"""Maximum number of answers in a record of the form `ranked`."""


@dataclass(frozen=True)
class RecordForm:
    """A form of records."""

    keys: tuple[str, ...]
    """The keys of a graph that the form yields."""
    fields: tuple[str, ...]
    """Fields of a record from which the keys are made."""
    other_fields: tuple[str, ...]
    """Fields of the form's other notation. A record uses this notation if it has one of these fields that is not in
    `fields`."""
    variants: tuple[tuple[str, ...], ...] = ()
    """Fields of other common notations, in order of precedence. `data/variants.py` converts them."""

    @property
    def accepted(self) -> str:
        """The accepted fields in words, for error messages."""
        ways, variants = (
            [f"{{{', '.join(fields)}}}" for fields in dict.fromkeys(found)]
            for found in ((self.fields, self.other_fields), self.variants)
        )
        return join(ways, "or") + (f" ({join(variants, 'or')} will do)" if variants else "")

    def is_other(self, present: Collection[str]) -> bool:
        """Return whether a record with these fields uses `other_fields`."""
        return any(field in present for field in self.other_fields if field not in self.fields)

    def fields_of(self, present: Collection[str]) -> tuple[str, ...]:
        """Return the fields from which keys are made, for a record with these fields."""
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
"""All forms of records, by name.

`answer`: prompts with answers, or conversations. `pair`: preferred and rejected answers to one prompt. `label`:
prompts with a completion that is good or bad. `ranked`: answers to one prompt, the best one first. `steps`: prompts
with a completion in steps, each of which is right or wrong. `prompt`: prompts for generation.
"""
