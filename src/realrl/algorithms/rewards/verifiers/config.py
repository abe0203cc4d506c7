"""Verifiers by kind. No torch."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import BeforeValidator, SerializeAsAny, ValidationError

from realrl.algorithms.rewards.verifiers.base import Verifier
from realrl.algorithms.rewards.verifiers.math import MathEquality
from realrl.algorithms.rewards.verifiers.numeric import Numeric
from realrl.algorithms.rewards.verifiers.python_tests import PythonTests
from realrl.algorithms.rewards.verifiers.schema import JsonSchema
from realrl.algorithms.rewards.verifiers.text import ExactMatch, Regex
from realrl.config.errors import join
from realrl.config.explain import brief, explain, nearest

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


def _read(value: Any) -> Any:
    if isinstance(value, Verifier):
        return value
    kinds = join(list(VERIFIERS), "or")
    if not isinstance(value, Mapping):
        raise ValueError(f"{brief(value)} is no verifier; give a section with a kind: {kinds}")
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


VerifierSetting = Annotated[SerializeAsAny[Verifier], BeforeValidator(_read)]
"""Setting that describes a verifier: a section with its `kind`."""
