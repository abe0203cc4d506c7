"""Handling of unusable records, which raise an error, or are skipped and counted."""

from typing import Literal

from realrl.config.errors import UserError

REASONS_KEPT = 5
"""Maximum number of kept reasons. They suffice to see a pattern, and do not fill memory for a large broken file."""


class BadRecordError(ValueError):
    """A record has the wrong form. The text names the accepted form."""


class Rejects:
    """Handles unusable records: raises an error with `fail`, and counts the record with `skip`."""

    def __init__(
        self,
        on_error: Literal["fail", "skip"],
        on_too_long: Literal["fail", "skip", "keep_start", "keep_end"] | None = None,
    ) -> None:
        """`on_too_long` is for well-formed but too long records; None means the same as `on_error`.

        A record that should be cut (`keep_start`, `keep_end`), but cannot be cut, is skipped."""
        self.on_error = on_error
        self.on_too_long = on_too_long or on_error
        self.count = 0
        """Number of skipped records."""
        self.too_long = 0
        """Number of skipped records that are too long."""
        self.reasons: list[str] = []

    def __call__(self, origin: str, reason: str, *, too_long: bool = False) -> None:
        """Reject the record at `origin`, FILE:LINE, for a reason. Raises UserError with `fail`."""
        message = f"{origin}: {reason}"
        if (self.on_too_long if too_long else self.on_error) == "fail":
            raise UserError(message)
        self.count += 1
        self.too_long += too_long
        if len(self.reasons) < REASONS_KEPT:
            self.reasons.append(message)
