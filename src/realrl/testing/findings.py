"""Results of checks."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """Result of one check of a recipe."""

    check: str
    """What was checked."""
    problem: str | None = None
    """The first difference or failure; None if there is none."""
    reason: str | None = None
    """The likely reason of a problem."""
    notes: tuple[str, ...] = ()
    """What is worth knowing, but not a mistake for certain."""
