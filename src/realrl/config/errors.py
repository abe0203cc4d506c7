"""Exceptions that are shown to the user as one message, without a traceback; anything else is a bug."""


class UserError(ValueError):
    """A mistake in what the user gave us. Its text is the error message; commands exit with status 2."""


class UserCodeError(UserError):
    """A mistake in code of the user's that we call. `trace` is its traceback, which they see above the message;
    `alone` whether other ranks may not know of it."""

    def __init__(self, message: str, trace: str = "", alone: bool = False) -> None:
        super().__init__(message, trace, alone)
        self.trace, self.alone = trace, alone

    def __str__(self) -> str:
        return str(self.args[0])


class RunError(RuntimeError):
    """Something that stopped a run and is neither a mistake in its input nor a bug: a full disk, learning that has
    gone wrong. Its text is the error message; commands exit with status 1."""
