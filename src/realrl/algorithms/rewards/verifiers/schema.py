"""Verifier of JSON."""

import json
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from pydantic import field_validator

from realrl.algorithms.rewards.scoring.scores import Score
from realrl.algorithms.rewards.verifiers.base import Verification, Verifier, extract
from realrl.algorithms.rewards.verifiers.extra import require
from realrl.config.errors import UserError
from realrl.config.json_file import unique_keys
from realrl.config.paths import local_path
from realrl.config.values import Pattern


class JsonSchema(Verifier):
    """1 for a completion that is JSON of a schema."""

    kind: Literal["json_schema"]
    json_schema: dict[str, Any] | str
    """The schema, or the JSON file that holds it."""
    extract: Pattern | None = None
    """What of the completion is the JSON, as of `exact_match`; null for the whole completion."""

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
        """Check the schema; UserError where it is none."""
        require("jsonschema", "json_schema")
        self._validator()
        return self

    def verify(self, completions: list[str], fields: Mapping[str, list[Any]]) -> list[Score]:
        """Validate each completion."""
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
            raise UserError(f"verifier json_schema: this is no schema: {error.message}") from None
        return found(schema)

    def _check(self, completion: str, validator: Any) -> float:
        text = completion if self.extract is None else extract(completion, self.extract)
        if text is None:
            return 0.0
        try:
            value = json.loads(text, object_pairs_hook=unique_keys, parse_constant=_refuse)
            return float(validator.is_valid(value))
        except (ValueError, RecursionError):  # JSON of another program, or nested without end
            return 0.0


def _refuse(constant: str) -> Any:
    """Refuse NaN and Infinity, which JSON does not have."""
    raise ValueError(constant)
