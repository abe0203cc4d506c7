"""Restrictions of the tokens that a generate call samples: each takes passes over the vocabulary of its own."""

from dataclasses import dataclass
from typing import Self

from realrl.recipe.generation import GenerationConfig


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Restrictions of the tokens that are drawn."""

    top_k: bool = False
    """Whether the k likeliest tokens are kept."""
    top_p: bool = False
    """Whether the likeliest tokens are kept that together have a probability."""
    minimum: bool = False
    """Whether sequences must not end before some tokens."""

    @classmethod
    def of(cls, generation: GenerationConfig) -> Self:
        """Return the restrictions of a recipe."""
        return cls(
            top_k=generation.top_k > 0,
            top_p=generation.top_p < 1,
            minimum=generation.min_new_tokens > 0,
        )


UNRESTRICTED = Sampling()
"""Every token may be drawn."""
