"""User's judge: a Python function that rates completions, and errors it may cause."""

import math
from collections.abc import Callable, Sequence
from numbers import Number
from typing import Any

from realrl.config.errors import UserError
from realrl.config.user_code import UserCode


class Judge:
    """Function that `training.judge` names, called and checked."""

    def __init__(self, reference: str) -> None:
        """`reference` is `FILE.py:FUNCTION` or `package.module:FUNCTION`; UserError where there is no such
        function."""
        self._reference = reference
        if ":" not in reference:
            raise UserError(f"training.judge={reference}: write FILE.py:FUNCTION or package.module:FUNCTION")
        self._code = UserCode("training.judge", reference)
        function: Any = self._code.attribute(reference.rpartition(":")[2])
        if not callable(function):
            raise UserError(f"training.judge={reference} is no function")
        self._function: Callable[[list[str]], Any] = function

    def rate(self, completions: Sequence[str]) -> list[float]:
        """Rate completions with a finite number each; UserError where the function fails or returns else."""
        with self._code.errors("raised"):
            # What it gives may be a generator, and then this runs the function.
            given = self._function(list(completions))
            values = list(given) if hasattr(given, "__iter__") and not isinstance(given, str) else None
        wanted = f"it must give one number for each of {len(completions)} completions"
        if values is None:
            raise UserError(f"training.judge={self._reference} gave {_shown(given)}; {wanted}")
        if len(values) != len(completions):
            raise UserError(
                f"training.judge={self._reference} gave {len(values)} numbers for {len(completions)} completions;"
                " it must give one each"
            )
        return [self._number(value, wanted) for value in values]

    def _number(self, value: Any, wanted: str) -> float:
        try:
            # float() would also read texts.
            number = math.nan if isinstance(value, str | bytes) else float(value)
        except (TypeError, ValueError, RuntimeError):
            number = math.nan
        if not math.isfinite(number):
            raise UserError(
                f"training.judge={self._reference} gave {_shown(value)} for a completion; {wanted}"
            )
        return number


def _shown(value: Any) -> str:
    """Format a wrong value for an error message."""
    if value is None or isinstance(value, Number):
        return str(value)
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 40 else text[:40] + '...'}"
