"""Forms of records: which keys of a dataflow graph each yields. `data/forms.py` reads them."""

from collections.abc import Mapping
from types import MappingProxyType

FORMS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "answer": ("tokens", "loss_mask"),
        "pair": ("chosen", "rejected", "pairs_of_prompt"),
        "prompt": ("prompts",),
    }
)
"""Form of record -> keys it yields.

`answer`: prompts with answers, or conversations. `pair`: preferred and other answers to one prompt. `prompt`:
prompts to generate from.
"""
