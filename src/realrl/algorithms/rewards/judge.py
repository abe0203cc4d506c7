"""The judge of evaluations: a function of the user's that takes no part in training."""

from collections.abc import Mapping, Sequence
from typing import Any

from realrl.algorithms.rewards.scorers import FunctionScorer
from realrl.config.user_code import UserFunction


class Judge(FunctionScorer):
    """Function of `evaluation.judge`, which gets the arguments of reward functions.

    A judge that does not name `completions` gets them as its first argument, whatever the name of the argument.
    """

    def __init__(self, reference: str) -> None:
        super().__init__("evaluation.judge", reference)
        self._by_name = True
        """Whether the judge gets completions by name."""

    def load(self) -> None:
        """Import the function; UserError if it cannot be found or called."""
        self._loaded = function = UserFunction(self._setting, self._reference, awaits=True)
        named = function.names("completions") or function.first in ("prompts", "completion_ids")
        self._by_name = named or (function.has_signature and function.first is None)
        self._refuse_positional(
            [name for name in function.positional if self._by_name or name != function.first]
        )

    def wants(self, name: str) -> bool:
        """Tell whether the judge takes an argument of that name."""
        if self._by_name:
            return super().wants(name)
        taken = name in (self._function.first, "completions")
        return self._function.has_signature and not taken and super().wants(name)

    @property
    def required(self) -> Sequence[str]:
        """Arguments without a default that the judge gets by name."""
        return [name for name in super().required if self._by_name or name != self._function.first]

    def rate(self, arguments: Mapping[str, list[Any]]) -> list[float]:
        """Score answers. `arguments`: texts, tokens and columns of the records by name, with a value per answer.

        UserCodeError if the judge raises, or gives anything but a finite number per answer.
        """
        completions = arguments["completions"]
        named = {name: values for name, values in arguments.items() if self.wants(name)}
        return self._function.numbers(len(completions), *(() if self._by_name else (completions,)), **named)


def load_judge(reference: str | None) -> Judge | None:
    """Load the judge of a recipe, if it names one; UserError if it cannot be used."""
    if reference is None:
        return None
    judge = Judge(reference)
    judge.load()
    return judge
