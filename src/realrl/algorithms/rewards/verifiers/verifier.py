"""Base classes of verifiers. They name the column with the right answer, and extract the text to compare."""

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any, Protocol

from realrl.algorithms.base.scoring import RewardFailure, Score
from realrl.config.base import Settings
from realrl.config.errors import UserError
from realrl.config.values import Pattern, find_last


class Verification(Protocol):
    """A verifier that is ready to verify."""

    def verify(self, completions: list[str], fields: Mapping[str, list[Any]]) -> list[Score]:
        """Score completions. `fields`: one value per completion for each needed column of the records."""


class Verifier(Settings):
    """A built-in check of completions: 1 for a right completion, 0 for a wrong one."""

    kind: str
    """Which check it is."""

    @property
    def fields(self) -> tuple[str, ...]:
        """Columns of the records that it needs."""
        return ()

    def open(self) -> Verification:
        """Get ready. Raises UserError if something is not installed, or cannot be read."""
        return self

    def verify(self, completions: list[str], fields: Mapping[str, list[Any]]) -> list[Score]:
        raise NotImplementedError


class AnswerVerifier(Verifier):
    """A check against the right answer, a column of the records."""

    answer: str = "answer"
    """Column with the right answer. The reward does not apply to records without it."""
    extract: Pattern | None = None
    """Part of a completion that counts: `boxed`, the content of the last \\boxed{}; or a regular expression,
    group 1 of its last match or, without groups, the whole match. A completion without it is wrong. null for the
    whole completion. Right answers are cut in the same way if they contain it."""

    @property
    def fields(self) -> tuple[str, ...]:
        return (self.answer,)

    def verify(self, completions: list[str], fields: Mapping[str, list[Any]]) -> list[Score]:
        return self.verify_by(self.compare, completions, fields)

    @property
    def reads_answers(self) -> bool:
        """Whether `read_answer` gives different texts for different answers."""
        return True

    def read_answer(self, completion: str) -> str | None:
        """Read the answer of a completion, as equal texts for equal answers; None if it has none."""
        return completion if self.extract is None else extract(completion, self.extract)

    def compare(self, text: str, right: str) -> Score:
        """Score the part of a completion that counts against that of its answer."""
        raise NotImplementedError

    def verify_by(
        self,
        compare: Callable[[str, str], Score],
        completions: list[str],
        fields: Mapping[str, list[Any]],
    ) -> list[Score]:
        """Compare each completion with its answer, by a given function in place of `compare`."""
        pairs = zip(completions, fields[self.answer], strict=True)
        return [self._check(compare, text, right) for text, right in pairs]

    def _check(self, compare: Callable[[str, str], Score], completion: str, right: Any) -> Score:
        if right is None:
            return None
        if not isinstance(right, str | int | float) or isinstance(right, bool):
            return RewardFailure(f"needs a text or a number as {self.answer}, not a {type(right).__name__}")
        if self.extract is None:
            return compare(completion, str(right))
        found = extract(completion, self.extract)
        return 0.0 if found is None else compare(found, extract(str(right), self.extract) or str(right))


def extract(text: str, pattern: str) -> str | None:
    """Find the part of a text that counts, see `AnswerVerifier.extract`."""
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


def require(module: str, verifier: str) -> None:
    """Check that a library of the extra `verifiers` is installed. Raises UserError if not."""
    if find_spec(module) is None:
        raise UserError(
            f"verifier {verifier} needs {module.replace('_', '-')}, which is not installed; run"
            " pip install 'realrl[verifiers]'"
        )
