"""Setting `reward` of a recipe (one term, or a weighted mixture of named terms), and the calls that compute it.

This module does not import torch.
"""

import re
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    Field,
    PositiveFloat,
    SerializeAsAny,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from realrl.algorithms.rewards.http import HttpConfig
from realrl.algorithms.rewards.verifiers.math import MathEquality
from realrl.algorithms.rewards.verifiers.numeric import Numeric
from realrl.algorithms.rewards.verifiers.python_tests import PythonTests
from realrl.algorithms.rewards.verifiers.verifier import (
    AnswerVerifier,
    ExactMatch,
    JsonSchema,
    Regex,
    Verifier,
)
from realrl.config.base import Settings
from realrl.config.errors import UserError, join
from realrl.config.explain import brief, explain, nearest
from realrl.config.user_code import FunctionReference, resolve_setting
from realrl.dataflow.call import Call, Key, Kind
from realrl.recipe.environment import EnvironmentConfig
from realrl.recipe.evaluation import AnswerReader

VERIFIERS: Mapping[str, type[Verifier]] = MappingProxyType(
    {
        "exact_match": ExactMatch,
        "numeric": Numeric,
        "math": MathEquality,
        "regex": Regex,
        "json_schema": JsonSchema,
        "python_tests": PythonTests,
    }
)


def _read_verifier(value: Any) -> Any:
    if isinstance(value, Verifier):
        return value
    kinds = join(list(VERIFIERS), "or")
    if not isinstance(value, Mapping):
        raise ValueError(f"{brief(value)} is not a verifier; give a section with a kind: {kinds}")
    kind = value.get("kind")
    cls = VERIFIERS.get(kind) if isinstance(kind, str) else None
    if cls is None:
        hint = nearest(str(kind), VERIFIERS)
        said = "kind is missing" if kind is None else f"kind={brief(kind)} is unknown"
        raise ValueError(f"{said}; " + (f"did you mean {hint}?" if hint else f"give {kinds}"))
    try:
        return cls.model_validate(value)
    except ValidationError as error:
        raise ValueError(f"{kind}: {explain(error, cls, most=1)}") from None


VerifierSetting = Annotated[SerializeAsAny[Verifier], BeforeValidator(_read_verifier)]
"""Setting that describes a verifier: a section with its `kind`."""

SINGLE = "reward"
"""Name of the only term of a reward."""

SOURCES = ("function", "verifier", "http", "model", "environment")


class RewardTerm(Settings):
    """One reward: a function, a verifier, a service, the model of `models.reward`, or the environment."""

    function: FunctionReference | None = None
    """`FILE.py:FUNCTION` or `package.module:FUNCTION`. The function is called with lists as keyword arguments:
    `prompts`, `completions`, `completion_ids` and each extra column of the records. Unless it has `**kwargs`, it
    gets only the arguments that it names. It returns one number per completion, or None for a completion that the
    reward does not apply to. It may be `async def`."""
    verifier: VerifierSetting | None = None
    """A built-in check, chosen by `kind`."""
    http: HttpConfig | None = None
    """A service that gives scores."""
    model: Literal["reward"] | None = None
    """`reward`: the reward model of `models.reward`."""
    environment: Literal[True] | None = None
    """true: the reward that the environment gives (`environment`)."""
    weight: float = 1.0
    """Factor of the score in the sum over terms. 0 only measures the term."""
    on_error: Literal["fail", "skip"] = "fail"
    """If the reward fails for a sample: end the run (`fail`), or leave the sample out of the loss and all means
    (`skip`)."""
    timeout: PositiveFloat | None = 600.0
    """Maximum seconds for the scores of a batch; null for no limit."""

    @property
    def source(self) -> str:
        """The entry of `SOURCES` that the term has."""
        return next(name for name in SOURCES if getattr(self, name) is not None)

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        given = [name for name in SOURCES if getattr(self, name) is not None]
        if len(given) != 1:
            said = f"{' and '.join(given)} are given" if given else "none is given"
            raise ValueError(f"a reward is one of {', '.join(SOURCES)}; {said}")
        if self.model is not None:
            fields = type(self).model_fields
            for field in ("on_error", "timeout"):
                if field in self.model_fields_set and getattr(self, field) != fields[field].default:
                    raise ValueError(
                        f"{field} is not for a reward model, which neither fails nor hangs by itself"
                    )
        return self


Rewards = Mapping[str, RewardTerm]
"""Terms by name."""


def is_mixture(reward: Rewards) -> bool:
    """Return whether the reward is a weighted sum: it has several terms, or one term whose weight is not 1."""
    return len(reward) > 1 or any(term.weight != 1 for term in reward.values())


def may_skip(reward: Rewards | None) -> bool:
    """Return whether samples may be left without a score. A reward model alone scores all samples."""
    return reward is not None and (is_mixture(reward) or any(term.model is None for term in reward.values()))


def name_setting(name: str) -> str:
    """Write the path of a term in recipes, for error messages."""
    return SINGLE if name == SINGLE else f"{SINGLE}.{name}"


def name_key(name: str, prefix: str = "") -> str:
    """Name the key of a term's scores in a mixture."""
    return f"{prefix}score_{name}"


def check_models(reward: Rewards | None, model: object, roles: Collection[str]) -> None:
    """Check terms against the models of a recipe. Raises ValueError if they contradict each other."""
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


def environment_reward() -> Rewards:
    """Make the reward of a recipe that names an environment and no reward."""
    return {SINGLE: RewardTerm(environment=True)}


def find_environment_weight(reward: Rewards | None) -> float:
    """Return the weight of the environment's reward in the score; 0 if the score does not contain it."""
    return sum(term.weight for term in (reward or {}).values() if term.environment)


def check_environment_terms(reward: Rewards | None, environment: EnvironmentConfig | None) -> None:
    """Check that a recipe whose reward comes from the environment has one. Raises ValueError if not."""
    uses = [name for name, term in (reward or {}).items() if term.environment]
    if uses and environment is None:
        raise ValueError(f"{name_setting(uses[0])}.environment: true needs environment, a class or a section")


def _read(value: Any, info: ValidationInfo) -> Any:
    """Read the setting `reward` of a recipe as terms by name."""
    if value is None:
        return None
    if isinstance(value, str):
        return {SINGLE: RewardTerm(function=resolve_setting(value, info.field_name or SINGLE))}
    if not isinstance(value, Mapping) or not value:
        raise ValueError(
            f"{brief(value)} is not a reward; give FILE.py:FUNCTION, package.module:FUNCTION, a term such as"
            " {verifier: {kind: exact_match}}, or terms by name"
        )
    # A section with a key of RewardTerm is a term, so no term of a mixture can have such a name.
    if any(key in RewardTerm.model_fields for key in value):
        terms = {SINGLE: _read_term("", value)}
    else:
        terms = {_check_name(name): _read_term(f"{name}", term) for name, term in value.items()}
    if all(term.weight == 0 for term in terms.values()):
        raise ValueError("all weights are 0; at least one term must count")
    return terms


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
        raise ValueError(f"{start}{brief(value)} is not a reward; give FILE.py:FUNCTION or a section of keys")
    try:
        return RewardTerm.model_validate(value)
    except ValidationError as error:
        message = explain(error, RewardTerm, most=1)
        raise ValueError(f"{name}.{message}" if name and message[:1].islower() else start + message) from None


def _check_name(name: Any) -> str:
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z][\w-]*", name):
        raise ValueError(f"{brief(name)} is not a name of a term: letters, digits, - and _, a letter first")
    return name


RewardSetting = Annotated[dict[str, RewardTerm] | None, Field(default=None), BeforeValidator(_read)]
"""Setting `reward` of a recipe: a reference to a function, a term, or terms by name; null for `models.reward`."""


# Calls that score sequences: one for each term of the reward, and one for their sum.

SUM = "reward.sum"
"""Call that adds up the terms of a mixture."""


def list_score_keys(reward: Rewards | None, prefix: str = "") -> list[Key]:
    """List the keys that `score_sequences` produces: the score and, for a mixture, the score of each term."""
    terms = reward if reward is not None and is_mixture(reward) else {}
    names = [f"{prefix}score", *(name_key(name, prefix) for name in terms)]
    # Advantages are differences of scores. Float32 would lose a difference of 1e-5 between rewards near 1,000.
    return [Key(name, "float64", "one") for name in names]


def name_call(name: str, term: RewardTerm | None, prefix: str = "") -> str:
    """Name the call of a term. `term` is None if the reward is a reward model alone."""
    kind = Kind.INFERENCE if term is None or term.model is not None else Kind.FUNCTION
    return f"{name}.{kind}_{prefix}".rstrip("_")


def score_sequences(reward: Rewards | None, extra: tuple[str, ...] = (), *, prefix: str = "") -> list[Call]:
    """Make the calls that score sequences. `reward` is None for a reward model alone.

    `extra`: further inputs, which metrics need. `prefix`: prefix of the keys of sequences. It is also the suffix of
    the names of calls.
    """
    extra = tuple(f"{prefix}{key}" for key in extra)
    terms: dict[str, RewardTerm | None] = {SINGLE: None} if reward is None else {**reward}
    if reward is None or not is_mixture(reward):
        return [_score(name, term, f"{prefix}score", extra, prefix) for name, term in terms.items()]
    keys = {name: name_key(name, prefix) for name in reward}
    sequences = f"{prefix}sequences"
    total = Call(
        f"{SUM}_{prefix}".rstrip("_"),
        None,
        Kind.FUNCTION,
        (sequences, *extra, *keys.values()),
        (f"{prefix}score",),
        work=(sequences,),
        function="realrl.algorithms.rewards.reward_methods:RewardSum",
    )
    return [*(_score(name, term, keys[name], extra, prefix) for name, term in terms.items()), total]


def _score(name: str, term: RewardTerm | None, key: str, extra: tuple[str, ...], prefix: str) -> Call:
    on_host = term is not None and term.model is None
    sequences = f"{prefix}sequences"
    # Functions see texts, which start where the prompt ends.
    texts = (f"{prefix}prompt_length",) if on_host else ()
    return Call(
        name_call(name, term, prefix),
        None if on_host else "reward",
        Kind.FUNCTION if on_host else Kind.INFERENCE,
        tuple(dict.fromkeys((sequences, *texts, *extra))),
        (key,),
        work=(sequences,),
        function=_refer(name, term) if term is not None and on_host else None,
        record_fields=term is not None and on_host and not term.environment,
    )


def _refer(name: str, term: RewardTerm) -> str:
    """Write the reference under which profiles keep the measured seconds of a term."""
    scorers = "realrl.algorithms.rewards.scorers"
    built_in = {"verifier": scorers, "environment": scorers, "http": "realrl.algorithms.rewards.http"}
    return term.function or f"{built_in[term.source]}:{name}"


def find_answer_reader(reward: Rewards | None) -> AnswerReader | None:
    """Find the verifier of a reward that reads an answer out of completions, if there is one.

    Raises UserError if several terms have one.
    """
    found = {
        name: term.verifier
        for name, term in (reward or {}).items()
        if isinstance(term.verifier, AnswerVerifier) and term.verifier.reads_answers
    }
    if len(found) > 1:
        raise UserError(
            f"evaluation.majority_at: {join([name_setting(name) for name in found])} each read an answer out of"
            " completions; one term may"
        )
    for name, verifier in found.items():
        key = name_key(name) if is_mixture(reward or {}) else "score"
        return AnswerReader(key, verifier.read_answer)
    return None
