"""Scores of single samples. No torch."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from realrl.config.errors import UserCodeError, UserError, join

SKIPPED = float("nan")
"""Score of a sample that has none, in the keys of scores: it leaves the loss and all means."""
NOT_APPLICABLE = float("-inf")
"""Score of a term of a mixture that does not apply to a sample, which its other terms score alone."""


class UnscoredError(UserCodeError):
    """No answer of a step has a score. Training cannot name the rewards; the worker adds them."""

    def __init__(self, scorers: Sequence[str] = (), answers: int = 0, step: int = 0) -> None:
        """`scorers`: functions that gave no score to any of the `answers` of a step, counted from 1."""
        which = join(scorers) if scorers else "the reward"
        of = f"all {answers} answers of step {step}" if step else "all answers of the step"
        super().__init__(
            f"{which} gave None, or failed, for {of}, so there is nothing to learn from; failures are above, or in"
            " the log of the rank that met them",
            alone=True,
        )


@dataclass(frozen=True)
class RewardFailure:
    """Sample whose reward could not be computed. `reason` follows the name of the reward in a message, and `trace`
    is the traceback of the user's code, if that raised."""

    reason: str
    trace: str = ""


Score = float | None | RewardFailure
"""A finite number, None where the reward does not apply to the sample, or why there is none."""

TEXTS = ("prompts", "completions", "completion_ids")
"""Arguments of rewards besides fields of records."""


class RewardScorer(Protocol):
    """A reward of the host: a function, a verifier, a service."""

    label: str
    """How messages name it."""

    def load(self) -> None:
        """Get ready; UserError where that fails."""

    def wants(self, name: str) -> bool:
        """Tell whether it looks at an argument: one of `TEXTS`, or a field of records."""

    @property
    def required(self) -> Sequence[str]:
        """Arguments that it cannot do without, after `load`."""

    def check_fields(self, source: str, fields: Collection[str]) -> None:
        """Check that `fields` of a source suit it; else UserError."""

    def score(self, count: int, arguments: Mapping[str, list[Any]]) -> list[Score]:
        """Score `count` samples, whose arguments are lists of so many; UserCodeError where it fails as a whole."""


def check_required(scorer: RewardScorer, source: str, fields: Collection[str]) -> None:
    """Check that records of a source have what a scorer needs; else UserError."""
    missing = [name for name in scorer.required if name not in (*TEXTS, *fields)]
    if missing:
        known, name = join([*TEXTS[:2], *sorted(fields)]), missing[0]
        hint = (
            f"{{{name}: NAME}} copies a nested field" if "." in name else f"{{FIELD: {name}}} renames a field"
        )
        raise UserError(
            f"{scorer.label} needs {name!r}, which no record of {source} has; there are {known};"
            f" data.columns={hint}"
        )
