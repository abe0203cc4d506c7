"""Forms of records: fields, and the keys of a dataflow graph that they yield. `data/record_forms.py` reads them."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from realrl.config.errors import join

MOST_ANSWERS = 16
"""Maximum answers in a record of ranked answers."""


@dataclass(frozen=True)
class RecordForm:
    """Form of record."""

    keys: tuple[str, ...]
    """The keys of a graph that the form yields."""
    fields: tuple[str, ...]
    """Fields of a record from which the keys are made."""
    other_fields: tuple[str, ...]
    """Fields of the form's other notation; a record with one of these that is not in `fields` uses it."""
    variants: tuple[tuple[str, ...], ...] = ()
    """Fields of other usual notations, in order of precedence, which `data/variants.py` rewrites."""

    @property
    def accepted(self) -> str:
        """Accepted fields, for error messages."""
        ways, variants = (
            [f"{{{', '.join(fields)}}}" for fields in dict.fromkeys(found)]
            for found in ((self.fields, self.other_fields), self.variants)
        )
        return join(ways, "or") + (f" ({join(variants, 'or')} will do)" if variants else "")

    def is_other(self, present: Collection[str]) -> bool:
        """Return whether a record with these fields uses `other_fields`."""
        return any(field in present for field in self.other_fields if field not in self.fields)

    def fields_of(self, present: Collection[str]) -> tuple[str, ...]:
        """List the fields of a record from which keys are made."""
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
with a completion in steps, each right or wrong. `prompt`: prompts for generation.
"""
