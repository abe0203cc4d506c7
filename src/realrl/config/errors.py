"""Exceptions shown to the user as one message, without a traceback; all others are bugs."""


class UserError(ValueError):
    """A mistake in the user's input. Its text is the error message; commands exit with status 2."""


class UserCodeError(UserError):
    """An error in the user's own code. `trace` is its traceback, printed above the message."""

    def __init__(self, message: str, trace: str = "") -> None:
        super().__init__(message, trace)
        self.trace = trace

    def __str__(self) -> str:
        return str(self.args[0])


class RunError(RuntimeError):
    """A failed run without a mistake or a bug: a full disk, diverged learning.

    Its text is the error message; commands exit with status 1.
    """
