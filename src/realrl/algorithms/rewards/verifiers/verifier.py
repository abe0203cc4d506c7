"""Base classes of verifiers, extraction of the text to compare, and verifiers of texts."""

import json
import re
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Protocol

from pydantic import field_validator

from realrl.algorithms.base.scoring import RewardFailure, Score
from realrl.config.base import Settings
from realrl.config.errors import UserError
from realrl.config.json_file import unique_keys
from realrl.config.paths import local_path
from realrl.config.values import Pattern, find_last


class Verification(Protocol):
    """A verifier that is ready to verify."""

    def verify(self, completions: list[str], fields: Mapping[str, list[Any]]) -> list[Score]:
        """Score completions. `fields`: one value per completion for each needed column of the records."""


class Verifier(Settings):
    """A built-in check of completions: 1 for a right completion, 0 for a wrong one."""

    kind: str
    """Name of the check."""

    @property
    def fields(self) -> tuple[str, ...]:
        """Columns of the records that the verifier needs."""
        return ()

    def open(self) -> Verification:
        """Prepare the verifier. Raises UserError if something is not installed, or cannot be read."""
        return self

    def verify(self, completions: list[str], fields: Mapping[str, list[Any]]) -> list[Score]:
        raise NotImplementedError


class AnswerVerifier(Verifier):
    """A check against the right answer, which a column of the records holds."""

    answer: str = "answer"
    """Column with the right answer. The reward does not apply to records without this column."""
    extract: Pattern | None = None
    """Part of a completion that counts. `boxed` takes the content of the last \\boxed{}. A regular expression takes
    group 1 of its last match or, without groups, the whole match. null takes the whole completion. A completion
    without such a part is wrong. A right answer that contains such a part is cut in the same way."""

    @property
    def fields(self) -> tuple[str, ...]:
        return (self.answer,)

    def verify(self, completions: list[str], fields: Mapping[str, list[Any]]) -> list[Score]:
        return self.verify_by(self.compare, completions, fields)

    @property
    def reads_answers(self) -> bool:
        """Whether `read_answer` returns different texts for different answers."""
        return True

    def read_answer(self, completion: str) -> str | None:
        """Read the answer of a completion as text. Equal answers have equal texts. None if there is no answer."""
        return completion if self.extract is None else extract(completion, self.extract)

    def compare(self, text: str, right: str) -> Score:
        """Score `text`, the part of a completion that counts. `right`: the same part of the right answer."""
        raise NotImplementedError

    def verify_by(
        self, compare: Callable[[str, str], Score], completions: list[str], fields: Mapping[str, list[Any]]
    ) -> list[Score]:
        """Compare each completion with its right answer by the argument `compare`, instead of the method."""
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


# Verifiers of texts: equality, regular expressions, and JSON of a schema.


class ExactMatch(AnswerVerifier):
    """1 for a completion that equals the right answer, character by character."""

    kind: Literal["exact_match"]
    strip: bool = True
    """Ignore white space at both ends."""
    ignore_case: bool = False
    """Ignore differences between upper and lower case."""

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
    """The regular expression."""
    whole: bool = False
    """The whole completion must match, instead of any part of it."""

    def verify(self, completions: list[str], fields: Mapping[str, list[Any]]) -> list[Score]:
        compiled = re.compile(self.pattern, re.DOTALL)
        find = compiled.fullmatch if self.whole else compiled.search
        return [float(find(text) is not None) for text in completions]


class JsonSchema(Verifier):
    """1 for a completion that is JSON which fits a schema."""

    kind: Literal["json_schema"]
    json_schema: dict[str, Any] | str
    """The schema, or a JSON file that holds it."""
    extract: Pattern | None = None
    """Part of a completion that is the JSON. It is written like `extract` of `exact_match`. null takes the whole
    completion."""

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
        """Check the schema. Raises UserError if it is not a JSON schema."""
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
