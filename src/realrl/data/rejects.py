"""Records that cannot be used: errors, or skipped and counted."""

from typing import Literal

from realrl.config.errors import UserError

REASONS_KEPT = 5
"""Number of reasons kept: enough to see a pattern; a broken file of a million lines must not fill memory."""


class BadRecordError(ValueError):
    """A record of the wrong form; the text says what is accepted."""


class Rejects:
    """Handler of records that cannot be used: raises under `fail`, counts under `skip`."""

    def __init__(
        self,
        on_error: Literal["fail", "skip"],
        on_too_long: Literal["fail", "skip", "keep_start", "keep_end"] | None = None,
    ) -> None:
        """`on_too_long` is for records that are well formed, but too long; None for the same as `on_error`.

        Records that should be cut, and cannot be, are skipped."""
        self.on_error = on_error
        self.on_too_long = on_too_long or on_error
        self.count = 0
        """Number of records that were skipped."""
        self.too_long = 0
        """Number of them that are too long."""
        self.reasons: list[str] = []

    def __call__(self, origin: str, reason: str, *, too_long: bool = False) -> None:
        """Reject the record at `origin`, FILE:LINE, for a reason; UserError under `fail`."""
        message = f"{origin}: {reason}"
        if (self.on_too_long if too_long else self.on_error) == "fail":
            raise UserError(message)
        self.count += 1
        self.too_long += too_long
        if len(self.reasons) < REASONS_KEPT:
            self.reasons.append(message)
