"""Base class of everything a user writes in a recipe."""

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """Strict, immutable settings: an unknown key is an error, never ignored, and a value of another type is
    one too: `true` is not 1, and `"3"` is not 3. Numbers are finite, and text is not empty."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        str_min_length=1,
        validate_default=True,
        use_attribute_docstrings=True,
    )
