"""Verifiers of texts: equality, regular expressions, and JSON of a schema."""

import json
import re
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from pydantic import field_validator

from realrl.algorithms.base.scoring import Score
from realrl.algorithms.rewards.verifiers.verifier import (
    AnswerVerifier,
    Verification,
    Verifier,
    extract,
    require,
)
from realrl.config.errors import UserError
from realrl.config.json_file import unique_keys
from realrl.config.paths import local_path
from realrl.config.values import Pattern


class ExactMatch(AnswerVerifier):
    """1 for a completion that equals the right answer, character by character."""

    kind: Literal["exact_match"]
    strip: bool = True
    """Ignore white space at both ends."""
    ignore_case: bool = False
    """Ignore upper and lower case."""

    def read_answer(self, completion: str) -> str | None:
        found = super().read_answer(completion)
        return None if found is None else self._normalize(found)

    def compare(self, text: str, right: str) -> Score:
        return float(self._normalize(text) == self._normalize(right))

    def _normalize(self, text: str) -> str:
        text = text.strip() if self.strip else text
        return text.casefold() if self.ignore_case else text


class Regex(Verifier):
    """1 for a completion that matches a regular expression."""

    kind: Literal["regex"]
    pattern: Pattern
    """The expression."""
    whole: bool = False
    """Match the whole completion, instead of any part of it."""

    def verify(self, completions: list[str], fields: Mapping[str, list[Any]]) -> list[Score]:
        compiled = re.compile(self.pattern, re.DOTALL)
        find = compiled.fullmatch if self.whole else compiled.search
        return [float(find(text) is not None) for text in completions]


class JsonSchema(Verifier):
    """1 for a completion that is JSON of a schema."""

    kind: Literal["json_schema"]
    json_schema: dict[str, Any] | str
    """The schema, or a JSON file that holds it."""
    extract: Pattern | None = None
    """Part of a completion that is the JSON, as for `exact_match`; null for the whole completion."""

    @field_validator("json_schema")
    @classmethod
    def _resolve(cls, value: dict[str, Any] | str) -> dict[str, Any] | str:
        if isinstance(value, dict):
            return value
        file = local_path(value).resolve()
        if not file.is_file():
            raise ValueError(f"there is no file {file}")
        return str(file)

    def open(self) -> Verification:
        """Check the schema. Raises UserError if it is not one."""
        require("jsonschema", "json_schema")
        self._validator()
        return self

    def verify(self, completions: list[str], fields: Mapping[str, list[Any]]) -> list[Score]:
        validator = self._validator()
        return [self._check(text, validator) for text in completions]

    def _validator(self) -> Any:
        library = import_module("jsonschema")
        schema: Any = self.json_schema
        if isinstance(schema, str):
            try:
                schema = json.loads(Path(schema).read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                raise UserError(f"verifier json_schema: {self.json_schema} cannot be read: {error}") from None
        found = library.validators.validator_for(schema, default=library.Draft202012Validator)
        try:
            found.check_schema(schema)
        except library.SchemaError as error:
            raise UserError(f"verifier json_schema: this is not a schema: {error.message}") from None
        return found(schema)

    def _check(self, completion: str, validator: Any) -> float:
        text = completion if self.extract is None else extract(completion, self.extract)
        if text is None:
            return 0.0
        try:
            value = json.loads(text, object_pairs_hook=unique_keys, parse_constant=_refuse)
            return float(validator.is_valid(value))
        except (ValueError, RecursionError):  # not JSON, or nested too deeply
            return 0.0


def _refuse(constant: str) -> Any:
    """Refuse NaN and Infinity, which are not JSON."""
    raise ValueError(constant)
