"""Rewards of a recipe: one term, or a weighted mixture of named terms. No torch."""

import re
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, PositiveFloat, ValidationError, ValidationInfo, model_validator

from realrl.algorithms.rewards.http.config import HttpConfig
from realrl.algorithms.rewards.verifiers.config import VerifierSetting
from realrl.config.base import Settings
from realrl.config.errors import UserError
from realrl.config.explain import brief, explain
from realrl.config.user_code import FunctionReference, resolve_setting

SINGLE = "reward"
"""Name of the term of a reward that is no mixture."""

SOURCES = ("function", "verifier", "http", "model")


class RewardTerm(Settings):
    """One reward: a function, a verifier, a service, or the model of `models.reward`."""

    function: FunctionReference | None = None
    """`FILE.py:FUNCTION` or `package.module:FUNCTION`: called with `prompts=[...]`, `completions=[...]` and every
    further field of the records by its name, as lists, or those of them that it names; it returns one number for
    each completion, None where the reward does not apply. May be `async def`."""
    verifier: VerifierSetting | None = None
    """A check that ships with the package, chosen by `kind`."""
    http: HttpConfig | None = None
    """A service that is asked for scores."""
    model: Literal["reward"] | None = None
    """`reward`: the reward model of `models.reward`."""
    weight: float = 1.0
    """Factor of the score in the sum over terms; 0 for a term that is only measured."""
    on_error: Literal["fail", "skip"] = "fail"
    """Samples without a score because the reward failed end the run (`fail`), or leave the loss and all means
    (`skip`)."""
    timeout: PositiveFloat | None = 600.0
    """Seconds within which the scores of a batch must be there; null for no limit."""

    @property
    def source(self) -> str:
        """Name of the one of `SOURCES` that is given."""
        return next(name for name in SOURCES if getattr(self, name) is not None)

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        given = [name for name in SOURCES if getattr(self, name) is not None]
        if len(given) != 1:
            said = f"{' and '.join(given)} are given" if given else "none is given"
            raise ValueError(f"a reward is one of {', '.join(SOURCES)}; {said}")
        if self.model is not None:
            for field in ("on_error", "timeout"):
                if (
                    field in self.model_fields_set
                    and getattr(self, field) != type(self).model_fields[field].default
                ):
                    raise ValueError(
                        f"{field} is not for a reward model, which neither fails nor hangs by itself"
                    )
        return self


Rewards = Mapping[str, RewardTerm]
"""Terms by name."""


def is_mixture(reward: Rewards) -> bool:
    """Tell whether terms have to be added up: unless there is one, of weight 1."""
    return len(reward) > 1 or any(term.weight != 1 for term in reward.values())


def may_skip(reward: Rewards | None) -> bool:
    """Tell whether samples may be left without a score: unless it is a reward model's alone."""
    return reward is not None and (is_mixture(reward) or any(term.model is None for term in reward.values()))


def name_setting(name: str) -> str:
    """Write the path of a term in recipes, for error messages."""
    return SINGLE if name == SINGLE else f"{SINGLE}.{name}"


def check_models(reward: Rewards | None, model: object, roles: Collection[str]) -> None:
    """Check terms against the models of a recipe; ValueError where they contradict each other."""
    uses = [name for name, term in (reward or {}).items() if term.model is not None]
    if reward is None and model is None:
        raise ValueError(
            "reward (a function, FILE.py:FUNCTION) and models.reward (a reward model) are both missing; give one"
        )
    if reward is not None and model is not None and not uses:
        raise ValueError(
            "reward (a function, FILE.py:FUNCTION) and models.reward (a reward model) are both given; keep one, or"
            " add them up: a mixture with a term {model: reward}"
        )
    if uses and model is None:
        raise ValueError(f"{name_setting(uses[0])}.model: reward needs models.reward")
    if len(uses) > 1:
        raise ValueError(f"reward: {' and '.join(uses)} are both the model; one term can be")
    clash = [name for name in reward or {} if name in roles and name != SINGLE]
    if clash:
        raise ValueError(f"reward: {clash[0]} is the name of a role; choose another for the term")


def _read(value: Any, info: ValidationInfo) -> Any:
    """Convert what a recipe says to terms by name."""
    if value is None:
        return None
    if isinstance(value, str):
        return {SINGLE: RewardTerm(function=resolve_setting(value, info.field_name or SINGLE))}
    if not isinstance(value, Mapping) or not value:
        raise ValueError(
            f"{brief(value)} is no reward; give FILE.py:FUNCTION, package.module:FUNCTION, a term such as"
            " {verifier: {kind: exact_match}}, or terms by name"
        )
    fields = RewardTerm.model_fields
    # A term is told from a mixture by its keys, so that no term can have the name of one.
    if any(key in fields for key in value):
        return {SINGLE: _read_term("", value)}
    return {_check_name(name): _read_term(f"{name}", term) for name, term in value.items()}


def _read_term(name: str, value: Any) -> RewardTerm:
    start = f"{name}: " if name else ""
    if isinstance(value, RewardTerm):
        return value
    if isinstance(value, str):
        try:
            return RewardTerm(function=resolve_setting(value, name))
        except UserError as error:
            raise ValueError(str(error)) from None
    if not isinstance(value, Mapping):
        raise ValueError(f"{start}{brief(value)} is no reward; give FILE.py:FUNCTION or a section of keys")
    try:
        return RewardTerm.model_validate(value)
    except ValidationError as error:
        message = explain(error, RewardTerm, most=1)
        raise ValueError(f"{name}.{message}" if name and message[:1].islower() else start + message) from None


def _check_name(name: Any) -> str:
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z][\w-]*", name):
        raise ValueError(f"{brief(name)} is no name of a term: letters, digits, - and _, a letter first")
    return name


def _check_weights(reward: dict[str, RewardTerm] | None) -> dict[str, RewardTerm] | None:
    if reward is not None and all(term.weight == 0 for term in reward.values()):
        raise ValueError("all weights are 0; at least one term must count")
    return reward


RewardSetting = Annotated[
    dict[str, RewardTerm] | None,
    Field(default=None),
    BeforeValidator(lambda value, info: _check_weights(_read(value, info))),
]
"""Setting `reward` of a recipe: a reference to a function, a term, or terms by name; null for `models.reward`."""
