"""What becomes of records that cannot be used."""

from typing import Literal

from realrl.config.errors import UserError

REASONS_KEPT = 5
"""Enough to see a pattern; a broken file of a million lines must not fill memory."""


class BadRecordError(ValueError):
    """A record that does not have the form it should have; the text says what is accepted."""


class Rejects:
    """Called with every record that cannot be used: an error under `fail`, counted under `skip`."""

    def __init__(self, on_error: Literal["fail", "skip"]) -> None:
        self.on_error = on_error
        self.count = 0
        self.reasons: list[str] = []

    def __call__(self, origin: str, reason: str) -> None:
        """`origin` is FILE:LINE, `reason` a sentence. UserError under `fail`."""
        message = f"{origin}: {reason}"
        if self.on_error == "fail":
            raise UserError(message)
        self.count += 1
        if len(self.reasons) < REASONS_KEPT:
            self.reasons.append(message)
