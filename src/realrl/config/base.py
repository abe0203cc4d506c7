"""Base class of recipe settings."""

from pydantic import BaseModel, ConfigDict


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
