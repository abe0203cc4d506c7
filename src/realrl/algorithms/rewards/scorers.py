"""Scorers: functions of the user's, and verifiers of the package."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from realrl.algorithms.rewards.config import RewardTerm, name_setting
from realrl.algorithms.rewards.http.scorer import HttpScorer
from realrl.algorithms.rewards.scoring.scores import TEXTS, RewardFailure, RewardScorer, Score, check_required
from realrl.algorithms.rewards.verifiers.base import Verification, Verifier
from realrl.config.errors import UserError
from realrl.config.user_code import UserFunction, describe_no_number, read_number

_LARGEST = torch.finfo(torch.float32).max


def make_scorer(name: str, term: RewardTerm) -> RewardScorer:
    """Make the scorer of a term that is no model."""
    setting = name_setting(name)
    if term.function is not None:
        return FunctionScorer(setting, term.function)
    if term.verifier is not None:
        return VerifierScorer(setting, term.verifier)
    assert term.http is not None, "a model has no scorer"
    return HttpScorer(setting, term.http)


class FunctionScorer:
    """A function of the user's, called as reward functions of TRL are.

    It gets keyword arguments `prompts`, `completions`, `completion_ids` and every further field of the records, as
    lists; one without `**kwargs` gets only those that it names.
    """

    def __init__(self, setting: str, reference: str) -> None:
        self._setting, self._reference = setting, reference
        self.label = f"{setting}={reference}"
        self._loaded: UserFunction | None = None

    @property
    def _function(self) -> UserFunction:
        assert self._loaded is not None, "only ranks that have loaded it ask for it"
        return self._loaded

    def load(self) -> None:
        """Import the function; UserError where there is none, or it cannot be called by keywords."""
        self._loaded = UserFunction(self._setting, self._reference, awaits=True)
        self._refuse_positional(self._loaded.positional)

    def _refuse_positional(self, names: Sequence[str]) -> None:
        if names:
            raise UserError(
                f"{self.label} takes {names[0]} by position only; it is called with keyword arguments"
            )

    def state_dict(self) -> Any:
        """Save what the function keeps; None where it keeps nothing."""
        return self._function.state_dict()

    def load_state_dict(self, state: Any) -> None:
        """Load what `state_dict` saved."""
        self._function.load_state_dict(state)

    def wants(self, name: str) -> bool:
        """Tell whether the function takes an argument of that name."""
        return self._function.accepts(name)

    @property
    def required(self) -> Sequence[str]:
        """Arguments without a default."""
        return self._function.required

    def check_fields(self, source: str, fields: Collection[str]) -> None:
        """Check that no field has the name of the texts."""
        clash = next((name for name in TEXTS if name in fields and self.wants(name)), None)
        if clash is not None:
            raise UserError(
                f"{self.label}: records of {source} have a field {clash!r}, which is the name of an argument;"
                " rename the field"
            )
        check_required(self, source, fields)

    def score(self, count: int, arguments: Mapping[str, list[Any]]) -> list[Score]:
        """Call it once."""
        values = self._function.values(count, **arguments)
        return [self._read(value, count) for value in values]

    def _read(self, value: Any, count: int) -> Score:
        if value is None:
            return None
        number = read_number(value)
        if number is None:
            return RewardFailure(describe_no_number(value, count))
        if abs(number) > _LARGEST:
            return RewardFailure(f"gave {number:g}, which is too large for float32")
        return number


class VerifierScorer:
    """A verifier of the package."""

    def __init__(self, setting: str, verifier: Verifier) -> None:
        self.label = f"{setting} (verifier {verifier.kind})"
        self._verifier = verifier
        self._opened: Verification | None = None

    def load(self) -> None:
        """Open it; UserError where what it needs is not there."""
        self._opened = self._verifier.open()

    def wants(self, name: str) -> bool:
        """Tell whether it looks at a field."""
        return name == "completions" or name in self._verifier.fields

    @property
    def required(self) -> Sequence[str]:
        """Fields that it looks at."""
        return self._verifier.fields

    def check_fields(self, source: str, fields: Collection[str]) -> None:
        """Check that records have them."""
        check_required(self, source, fields)

    def score(self, count: int, arguments: Mapping[str, list[Any]]) -> list[Score]:
        """Verify all completions."""
        assert self._opened is not None, "loaded before it is asked"
        return self._opened.verify(arguments["completions"], arguments)
