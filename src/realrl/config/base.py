"""Base class of recipe settings."""

from typing import Any

from pydantic import BaseModel, ConfigDict
from pydantic.fields import FieldInfo

DERIVED: dict[str, Any] = {"derived": True}
"""`json_schema_extra` of a field that other settings decide, and that nobody writes."""


class Settings(BaseModel):
    """Strict, immutable settings: unknown keys and values of another type are errors.

    `true` is not 1, and `"3"` is not 3. Numbers are finite, and text is not empty.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        str_min_length=1,
        validate_default=True,
        use_attribute_docstrings=True,
    )

    @classmethod
    def written_fields(cls) -> dict[str, FieldInfo]:
        """List the fields that may be written, by name."""
        return {name: of for name, of in cls.model_fields.items() if of.json_schema_extra != DERIVED}
