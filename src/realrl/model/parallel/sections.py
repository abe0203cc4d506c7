"""Sections of a pipeline stage that are computed one after the other, and what is done at their borders."""

from typing import Literal, Protocol

from torch import Tensor

Section = int | Literal["embedding", "head"]
"""Embedding, number of a layer in its stage, or final norm and head. With tied embeddings, on a single stage, the
head computes with parameters of the embedding, too."""


class SectionHooks(Protocol):
    """Functions that a forward pass calls at the borders of sections; both return what they are given.

    The head is entered with the hidden states before the final norm, and left by no call: who computes outputs of
    them knows when it is done.
    """

    def enter(self, section: Section, x: Tensor) -> Tensor:
        """Begin a section whose input is `x`."""
        ...

    def leave(self, section: Section, x: Tensor) -> Tensor:
        """End a section whose output is `x`."""
        ...


class NoHooks:
    """Hooks of parameters that are always in memory."""

    def enter(self, section: Section, x: Tensor) -> Tensor:
        """See `SectionHooks`."""
        return x

    def leave(self, section: Section, x: Tensor) -> Tensor:
        """See `SectionHooks`."""
        return x
