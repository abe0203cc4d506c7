"""Registry of algorithms: installed algorithms by name, and users' own algorithms by file or module."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, wraps
from importlib.metadata import EntryPoint
from typing import Any

from realrl.config.errors import UserError, join
from realrl.config.explain import brief, nearest
from realrl.config.registered import find_registered, load_registered, name_package
from realrl.config.user_code import UserCode, is_own_module
from realrl.recipe.algorithm import AlgorithmSpec

GROUP = "realrl.algorithms"
"""Group of entry points through which other packages add algorithms. The names of entry points are used in
recipes."""

BUILT_IN = {
    "sft": "realrl.algorithms.sft:ALGORITHM",
    "reward": "realrl.algorithms.reward_model:ALGORITHM",
    "ranked_reward": "realrl.algorithms.reward_model:RANKED",
    "process_reward": "realrl.algorithms.reward_model:PROCESS",
    "ppo": "realrl.algorithms.ppo:ALGORITHM",
    "grpo": "realrl.algorithms.policy_gradient:GRPO",
    "dr_grpo": "realrl.algorithms.policy_gradient:DR_GRPO",
    "dapo": "realrl.algorithms.policy_gradient:DAPO",
    "gspo": "realrl.algorithms.policy_gradient:GSPO",
    "rloo": "realrl.algorithms.policy_gradient:RLOO",
    "reinforce_pp": "realrl.algorithms.policy_gradient:REINFORCE_PP",
    "reinforce_pp_baseline": "realrl.algorithms.policy_gradient:REINFORCE_PP_BASELINE",
    "remax": "realrl.algorithms.policy_gradient:REMAX",
    "dpo": "realrl.algorithms.preference:DPO",
    "orpo": "realrl.algorithms.preference:ORPO",
    "simpo": "realrl.algorithms.preference:SIMPO",
    "distillation": "realrl.algorithms.distillation:DISTILLATION",
    "offline_distillation": "realrl.algorithms.distillation:OFFLINE_DISTILLATION",
    "expert_iteration": "realrl.algorithms.expert_iteration:ALGORITHM",
    "kto": "realrl.algorithms.kto:ALGORITHM",
}
"""Built-in algorithms by their names in recipes."""

ATTRIBUTE = "ALGORITHM"
"""Name that the description must have in a user's file or module."""


def list_algorithms() -> list[str]:
    """List the names of installed algorithms."""
    return sorted(_installed())


def find_algorithm(reference: Any) -> tuple[AlgorithmSpec, str]:
    """Find the description for a recipe's `algorithm`: an installed name, or a file or module with `ALGORITHM`.

    Also returns the reference, in which the path of a file is absolute. Raises UserError with the known algorithms
    if there is none, and UserCodeError if code cannot be imported.
    """
    if reference == "realrl.algorithms.sampling.spec":  # recipes of version 0.1 have this name
        reference = "realrl.algorithms.sampling"
    if isinstance(reference, str) and reference in _installed():
        return _load(_installed()[reference]), reference
    if not _is_module(reference):
        hint = nearest(str(reference), list_algorithms())
        raise UserError(
            f"algorithm: {brief(reference)} is not {describe_choices()}"
            + (f"; did you mean {hint}?" if hint else "")
        )
    code = UserCode("algorithm", reference)
    spec = vars(code.module).get(ATTRIBUTE)
    if not isinstance(spec, AlgorithmSpec):
        raise UserError(f"algorithm={reference}: {_describe_lack(code)}")
    return _with_errors(spec, code), str(code.file) if reference.endswith(".py") else reference


def get_algorithm(reference: str) -> AlgorithmSpec:
    """Return the description of an algorithm. Raises UserError or UserCodeError like `find_algorithm`."""
    return find_algorithm(reference)[0]


def find_user_code(reference: str) -> UserCode | None:
    """Import a user's algorithm, once per process; None for an algorithm of this package."""
    point = _installed().get(reference)
    if point is None:
        return None if is_own_module(reference) else UserCode("algorithm", reference)
    return None if is_own_module(point.module) else UserCode("algorithm", point.module)


def _describe_lack(code: UserCode) -> str:
    """Write an error message about a module that has no AlgorithmSpec named `ALGORITHM`."""
    values = vars(code.module)
    where = code.file or code.module.__name__
    has = f"its {ATTRIBUTE} is no AlgorithmSpec" if ATTRIBUTE in values else f"it has no {ATTRIBUTE}"
    others = [name for name, value in values.items() if isinstance(value, AlgorithmSpec)]
    hint = (
        f"; there {'is' if len(others) == 1 else 'are'} {join(others)}, which may be renamed"
        if others
        else ""
    )
    return f"{where} must hold an AlgorithmSpec named {ATTRIBUTE}, and {has}{hint}"


def _with_errors(spec: AlgorithmSpec, code: UserCode) -> AlgorithmSpec:
    """Wrap the functions of a description, so that their errors show the line of the user's code."""

    def guard(field: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*arguments: Any) -> Any:
            with code.errors(f"raised in {field}:", passing=(UserError,)):
                return function(*arguments)

        return call

    given = spec.given_functions
    return replace(spec, **{field: guard(field, function) for field, function in given.items()})  # type: ignore[arg-type]


def _is_module(reference: Any) -> bool:
    """Return whether a reference has the form FILE.py or package.module."""
    if not isinstance(reference, str):
        return False
    parts = reference.split(".")
    return reference.endswith(".py") or (len(parts) > 1 and all(part.isidentifier() for part in parts))


def describe_choices() -> str:
    """List the values that `algorithm` may have, in words for error messages."""
    return f"one of {', '.join(list_algorithms())}, or a FILE.py or package.module that describes one"


@cache
def _installed() -> dict[str, EntryPoint]:
    """Find the algorithms of this package and of other packages, by name."""
    return find_registered("algorithm", GROUP, BUILT_IN)


def _load(point: EntryPoint) -> AlgorithmSpec:
    spec = load_registered("algorithm", point)
    if not isinstance(spec, AlgorithmSpec) or spec.name != point.name:
        raise UserError(
            f"algorithm {point.name} of package {name_package(point)}: {point.value} is not an AlgorithmSpec"
            " of that name"
        )
    return spec
