"""Records that cannot be used: errors, or skipped and counted."""

from typing import Literal

from realrl.config.errors import UserError

REASONS_KEPT = 5
"""Number of reasons kept: enough to see a pattern; a broken file of a million lines must not fill memory."""


class BadRecordError(ValueError):
    """A record of the wrong form; the text says what is accepted."""


class Rejects:
    """Handler of records that cannot be used: raises under `fail`, counts under `skip`."""

    def __init__(self, on_error: Literal["fail", "skip"]) -> None:
        self.on_error = on_error
        self.count = 0
        self.reasons: list[str] = []

    def __call__(self, origin: str, reason: str) -> None:
        """Reject the record at `origin`, FILE:LINE, for a reason; UserError under `fail`."""
        message = f"{origin}: {reason}"
        if self.on_error == "fail":
            raise UserError(message)
        self.count += 1
        if len(self.reasons) < REASONS_KEPT:
            self.reasons.append(message)
