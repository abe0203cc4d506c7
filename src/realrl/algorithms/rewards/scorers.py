"""Scorers on the host: the user's functions, built-in verifiers, and the judge of evaluations."""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from realrl.algorithms.base.scoring import TEXTS, RewardFailure, Score, Scorer
from realrl.algorithms.rewards.config import RewardTerm, name_setting
from realrl.algorithms.rewards.http import HttpScorer
from realrl.algorithms.rewards.verifiers.verifier import Verification, Verifier
from realrl.config.errors import UserError
from realrl.config.user_code import UserFunction, describe_no_number, name_function, read_number
from realrl.dataflow.environment import ENVIRONMENT_REWARD

_LARGEST = torch.finfo(torch.float32).max


def make_scorer(name: str, term: RewardTerm) -> Scorer:
    """Make the scorer of a term other than a reward model."""
    setting = name_setting(name)
    if term.function is not None:
        return FunctionScorer(setting, term.function)
    if term.verifier is not None:
        return VerifierScorer(setting, term.verifier)
    if term.environment:
        return EnvironmentScorer(setting)
    assert term.http is not None, "a model has no scorer"
    return HttpScorer(setting, term.http)


class FunctionScorer(Scorer):
    """A user's function, which is called like reward functions of TRL.

    The keyword arguments are the lists `prompts`, `completions`, `completion_ids` and each extra column of the
    records. A function without `**kwargs` gets only the arguments that it names.
    """

    def __init__(self, setting: str, reference: str) -> None:
        self._setting, self._reference = setting, reference
        self.label = f"{setting}={name_function(reference)}"
        self._loaded: UserFunction | None = None

    @property
    def _function(self) -> UserFunction:
        assert self._loaded is not None, "only ranks that have loaded it ask for it"
        return self._loaded

    def load(self) -> None:
        """Import the function. Raises UserError if it does not exist or cannot be called by keywords."""
        self._loaded = UserFunction(self._setting, self._reference, awaits=True)
        self._refuse_positional(self._loaded.positional)

    def _refuse_positional(self, names: Sequence[str]) -> None:
        if names:
            raise UserError(
                f"{self.label} takes {names[0]} by position only; it is called with keyword arguments"
            )

    def state_dict(self) -> Any:
        return self._function.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self._function.load_state_dict(state)

    def wants(self, name: str) -> bool:
        return self._function.accepts(name)

    @property
    def required(self) -> Sequence[str]:
        return self._function.required

    def check_fields(self, source: str, fields: Collection[str]) -> None:
        """Check that records have the required columns, and no column with the name of one of `TEXTS`.

        A function that names `environments`, as functions of TRL may, is refused unless the records have this
        column.
        """
        clash = next((name for name in TEXTS if name in fields and self.wants(name)), None)
        if clash is not None:
            raise UserError(
                f"{self.label}: records of {source} have a field {clash!r}, which is the name of an argument;"
                " rename the field"
            )
        if "environments" not in fields and self._function.names("environments"):
            raise UserError(
                f"{self.label} names the argument 'environments', but the objects of an environment live in other"
                " processes; give the object a method get_reward or an attribute reward, and name"
                f" {ENVIRONMENT_REWARD!r} instead"
            )
        super().check_fields(source, fields)

    def score(self, count: int, arguments: Mapping[str, list[Any]]) -> list[Score]:
        return [self._read(value, count) for value in self._function.values(count, **arguments)]

    def _read(self, value: Any, count: int) -> Score:
        if value is None:
            return None
        number = read_number(value)
        if number is None:
            return RewardFailure(describe_no_number(value, count))
        if abs(number) > _LARGEST:
            return RewardFailure(f"gave {number:g}, which is too large for float32")
        return number


class VerifierScorer(Scorer):
    """A built-in verifier."""

    def __init__(self, setting: str, verifier: Verifier) -> None:
        self.label = f"{setting} (verifier {verifier.kind})"
        self._verifier = verifier
        self._opened: Verification | None = None

    def load(self) -> None:
        self._opened = self._verifier.open()

    def wants(self, name: str) -> bool:
        return name == "completions" or name in self._verifier.fields

    @property
    def required(self) -> Sequence[str]:
        return self._verifier.fields

    def score(self, count: int, arguments: Mapping[str, list[Any]]) -> list[Score]:
        assert self._opened is not None, "loaded before it is asked"
        return self._opened.verify(arguments["completions"], arguments)


class EnvironmentScorer(Scorer):
    """The reward that the environment gave to each trajectory."""

    def __init__(self, setting: str) -> None:
        self.label = f"{setting} (environment)"

    def load(self) -> None:
        """Do nothing: the environment is loaded for generation."""

    def wants(self, name: str) -> bool:
        return name == ENVIRONMENT_REWARD

    @property
    def required(self) -> Sequence[str]:
        return ()

    def score(self, count: int, arguments: Mapping[str, list[Any]]) -> list[Score]:
        missing = RewardFailure(
            "has no number for a trajectory; return a reward from step or run, or give the object a method"
            " get_reward or an attribute reward, which an agent needs that ends with an exception at a limit"
        )
        return [missing if math.isnan(reward) else reward for reward in arguments[ENVIRONMENT_REWARD]]


class Judge(FunctionScorer):
    """Function of `evaluation.judge`, which takes no part in training.

    The judge gets the arguments of reward functions. A judge that does not name `completions` gets the completions
    as its first argument, whatever the name of this argument.
    """

    def __init__(self, reference: str) -> None:
        super().__init__("evaluation.judge", reference)
        self._by_name = True
        """Whether the judge gets completions by name."""

    def load(self) -> None:
        """Import the function. Raises UserError if it cannot be found or called."""
        self._loaded = function = UserFunction(self._setting, self._reference, awaits=True)
        named = function.names("completions") or function.first in ("prompts", "completion_ids")
        self._by_name = named or (function.has_signature and function.first is None)
        self._refuse_positional(
            [name for name in function.positional if self._by_name or name != function.first]
        )

    def wants(self, name: str) -> bool:
        if self._by_name:
            return super().wants(name)
        taken = name in (self._function.first, "completions")
        return self._function.has_signature and not taken and super().wants(name)

    @property
    def required(self) -> Sequence[str]:
        """Arguments without a default that the judge gets by name."""
        return [name for name in super().required if self._by_name or name != self._function.first]

    def rate(self, arguments: Mapping[str, list[Any]]) -> list[float]:
        """Score answers. `arguments`: texts, tokens and columns of the records by name, one value per answer.

        Raises UserCodeError if the judge raises, or does not return one finite number per answer.
        """
        completions = arguments["completions"]
        named = {name: values for name, values in arguments.items() if self.wants(name)}
        return self._function.numbers(len(completions), *(() if self._by_name else (completions,)), **named)


def load_judge(reference: str | None) -> Judge | None:
    """Load the judge of a recipe, if it names one. Raises UserError if the judge cannot be used."""
    if reference is None:
        return None
    judge = Judge(reference)
    judge.load()
    return judge
