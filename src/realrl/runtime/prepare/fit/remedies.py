"""Remedies where something does not fit: changes are tried one after the other. No torch."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from realrl.config.errors import UserError
from realrl.runtime.prepare.fit.change import Attempts, Change, Draft

_SHARE = 0.6
"""Fraction of the remaining time for one source of changes, so that something is left for the next."""


@dataclass(frozen=True)
class Outcome:
    """Assessment of a draft."""

    shortfall: float
    """Bytes that the peak device lacks; 0 or less where everything fits."""
    figures: str
    """Memory or seconds that it needs, for example `needs 72 GiB`."""

    @property
    def fits(self) -> bool:
        """Whether no device runs over."""
        return self.shortfall <= 0


Result = TypeVar("Result", bound=Outcome)


@dataclass(frozen=True)
class Remedy(Generic[Result]):
    """Changes with which everything fits."""

    changes: tuple[Change, ...]
    outcome: Result

    def __str__(self) -> str:
        """Format it, for example `with recompute=true (needs 72 GiB)`."""
        texts = " and ".join(change.text for change in self.changes)
        return f"{self.changes[0].preposition} {texts} ({self.outcome.figures})"


def describe_remedies(remedies: Sequence[Remedy[Result]]) -> str:
    """Write remedies as a clause, for example `it fits on 4 nodes (step 3 s), or with data.batch=8 (step 9 s)`."""
    return f"it fits {', or '.join(map(str, remedies))}"


class Trials(Generic[Result]):
    """Trials of changes, for a number of seconds in all."""

    def __init__(self, assess: Callable[[Draft, float], Result], seconds: float) -> None:
        """`assess` evaluates a draft in about as many seconds as it is given, and raises UserError for one that is
        not possible."""
        self._assess = assess
        self._end = time.monotonic() + seconds

    def find_remedies(self, draft: Draft, sources: Iterable[Attempts], most: int) -> list[Remedy[Result]]:
        """Find a remedy with each source, until there are `most` of them."""
        found: list[Remedy[Result]] = []
        for source in sources:
            if len(found) == most:
                break
            deadline = time.monotonic() + _SHARE * self._left(self._end)
            fitting = [(c, result) for c, result in self._tried(source, draft, deadline) if result.fits]
            found += [Remedy((change,), result) for change, result in fitting[-1:]]
        return found

    def find_combination(
        self, draft: Draft, result: Result, sources: Callable[[Draft, Result], Iterable[Attempts]]
    ) -> Remedy[Result] | None:
        """Find changes that help only together: of each kind as much as there is, until everything fits.

        `result` is that of the draft as it is; `sources` are what could help a draft with a result.
        """
        chosen: list[Change] = []
        while not result.fits:
            for source in sources(draft, result):
                change, result_then = self._best(source, draft, result)
                if change is not None:
                    break
            else:
                return None
            chosen.append(change)
            draft, result = change.apply(draft), result_then
        return Remedy(tuple(chosen), result)

    def _best(self, source: Attempts, draft: Draft, result: Result) -> tuple[Change | None, Result]:
        """Find the change of a source that leaves the smallest shortfall, if any helps, and its outcome."""
        best: Change | None = None
        for change, after in self._tried(source, draft, self._end):
            if after.shortfall < result.shortfall:
                best, result = change, after
        return best, result

    def _tried(self, source: Attempts, draft: Draft, deadline: float) -> Iterator[tuple[Change, Result]]:
        """Yield the possible changes of a source, each with its outcome, until the deadline."""
        change = next(source, None)
        while change is not None and self._left(deadline) > 0:
            try:
                result = self._assess(change.apply(draft), self._left(deadline))
            except UserError:
                fits = False
            else:
                fits = result.fits
                yield change, result
            try:
                change = source.send(fits)
            except StopIteration:
                return

    @staticmethod
    def _left(deadline: float) -> float:
        return deadline - time.monotonic()
