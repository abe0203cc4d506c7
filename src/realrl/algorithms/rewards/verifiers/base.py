"""Base classes of verifiers: a field with the right answer, and the part of a completion that counts."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from realrl.algorithms.rewards.scoring.scores import RewardFailure, Score
from realrl.config.base import Settings
from realrl.config.values import Pattern, find_last


class Verification(Protocol):
    """A verifier at work."""

    def verify(self, completions: list[str], fields: Mapping[str, list[Any]]) -> list[Score]:
        """Score completions. `fields`: a value per completion of each field of records that is needed."""


class Verifier(Settings):
    """A check of completions that ships with the package: 1 for a right one, 0 for a wrong one."""

    kind: str
    """Which check it is."""

    @property
    def fields(self) -> tuple[str, ...]:
        """Fields of records that it needs."""
        return ()

    def open(self) -> "Verification":
        """Get ready: what verifies, with the state it needs.

        UserError where something is not installed, or cannot be read.
        """
        return self

    def verify(self, completions: list[str], fields: Mapping[str, list[Any]]) -> list[Score]:
        """Score completions. `fields`: a value per completion of each of `fields`."""
        raise NotImplementedError


class AnswerVerifier(Verifier):
    """A check against the right answer, a field of the record."""

    answer: str = "answer"
    """Field of the records with the right answer. Where a record has none, the reward does not apply."""
    extract: Pattern | None = None
    """What of the completion counts: `boxed`, the content of the last \\boxed{}; or a regular expression, group 1
    of its last match or, without a group, all of that. A completion without it is wrong. Null for the whole
    completion. Right answers are cut likewise, where they have it."""

    @property
    def fields(self) -> tuple[str, ...]:
        """The field of the right answer."""
        return (self.answer,)

    def verify(self, completions: list[str], fields: Mapping[str, list[Any]]) -> list[Score]:
        """Compare each completion with its answer."""
        return self.verify_by(self.compare, completions, fields)

    @property
    def reads_answers(self) -> bool:
        """Whether `read_answer` tells answers apart that are not equal."""
        return True

    def read_answer(self, completion: str) -> str | None:
        """Read the answer out of a completion, equal texts for equal answers; None where it has none."""
        return completion if self.extract is None else extract(completion, self.extract)

    def compare(self, text: str, right: str) -> Score:
        """Score what counts of a completion against what counts of its answer."""
        raise NotImplementedError

    def verify_by(
        self,
        compare: Callable[[str, str], Score],
        completions: list[str],
        fields: Mapping[str, list[Any]],
    ) -> list[Score]:
        """Score completions by a function of what counts of them, and of their answers."""
        answers = fields[self.answer]
        return [self._check(compare, text, right) for text, right in zip(completions, answers, strict=True)]

    def _check(self, compare: Callable[[str, str], Score], completion: str, right: Any) -> Score:
        if right is None:
            return None
        if not isinstance(right, str | int | float) or isinstance(right, bool):
            return RewardFailure(f"needs a text or a number as {self.answer}, not a {type(right).__name__}")
        expected = str(right)
        if self.extract is not None:
            expected = extract(expected, self.extract) or expected
        found = completion if self.extract is None else extract(completion, self.extract)
        return 0.0 if found is None else compare(found, expected)


def extract(text: str, pattern: str) -> str | None:
    """Find the part of a text that counts, see `AnswerVerifier.extract`; None where there is none."""
    if pattern == "boxed":
        return _find_last_boxed(text)
    last = find_last(pattern, text)
    return None if last is None else last.group(min(1, last.re.groups))


def _find_last_boxed(text: str) -> str | None:
    """Find the content of the last \\boxed{...} that is closed."""
    end = len(text)
    while (start := text.rfind("\\boxed{", 0, end)) >= 0:
        depth, first = 1, start + len("\\boxed{")
        for position in range(first, len(text)):
            depth += {"{": 1, "}": -1}.get(text[position], 0)
            if depth == 0:
                return text[first:position]
        end = start
    return None
