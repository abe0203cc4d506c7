"""Exceptions shown to the user as one message without a traceback; all other exceptions are bugs."""

from collections.abc import Sequence


class DescriptionError(ValueError):
    """A contradiction in code that describes an algorithm, a graph or a model family.

    For a user's code, the error message is the file and line, followed by this text.
    """


class UserError(ValueError):
    """A mistake in the user's input. Its text is the error message; commands exit with status 2."""


class UserCodeError(UserError):
    """An error in the user's own code.

    `trace`: traceback that is printed above the message. `alone`: whether other ranks may succeed."""

    def __init__(self, message: str, trace: str = "", alone: bool = False) -> None:
        super().__init__(message, trace, alone)
        self.trace, self.alone = trace, alone

    def __str__(self) -> str:
        return str(self.args[0])


class RunError(RuntimeError):
    """Failure of a run that is neither a user's mistake nor a bug, such as a full disk or diverged training.

    Its text is the error message; commands exit with status 1.
    """


def join(words: Sequence[str], last: str = "and") -> str:
    """Join words as text: `a`, `a and b`, `a, b and c`. `last`: the text before the last word."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {last} {words[-1]}"
