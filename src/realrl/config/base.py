"""Base class of everything a user writes in a recipe."""

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """Strict, immutable settings: an unknown key or a wrong type is an error, never ignored."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, use_attribute_docstrings=True
    )
