"""The user's judge: a function of theirs that rates completions, and what it may do wrong."""

import importlib.util
import math
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Number
from pathlib import Path
from typing import Any

from realrl.config.errors import UserCodeError, UserError
from realrl.config.paths import local_path


class Judge:
    """The function that `training.judge` names, called and checked."""

    def __init__(self, reference: str) -> None:
        """`reference` is FILE.py:FUNCTION; UserError where there is no such function."""
        self._reference = reference
        file, _, name = reference.rpartition(":")
        self._file = str(local_path(file))
        if not self._file.endswith(".py") or not Path(self._file).is_file():
            raise UserError(f"training.judge={reference}: write FILE.py:FUNCTION with a file that exists")
        spec = importlib.util.spec_from_file_location("realrl_judge", self._file)
        assert spec is not None and spec.loader is not None, "a .py file has a loader"
        module = importlib.util.module_from_spec(spec)
        # Where else dataclasses and pickle look for it.
        sys.modules[spec.name] = module
        with self._users_code("cannot be imported:"):
            spec.loader.exec_module(module)
        function: Any = getattr(module, name, None)
        if not callable(function):
            raise UserError(f"training.judge={reference}: {self._file} has no function {name}")
        self._function: Callable[[list[str]], Any] = function

    def rate(self, completions: Sequence[str]) -> list[float]:
        """A finite number for each completion; UserError where the function fails, or gives anything else."""
        with self._users_code("raised"):
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

    @contextmanager
    def _users_code(self, verb: str) -> Iterator[None]:
        try:
            yield
        except (Exception, SystemExit) as error:  # whatever the user's code does
            # The first frame is ours, and for an import so are some more.
            frames = traceback.extract_tb(error.__traceback__)
            file = Path(self._file).resolve()
            theirs = [frame for frame in frames if Path(frame.filename).resolve() == file]
            if theirs:
                frames = traceback.StackSummary.from_list(frames[frames.index(theirs[0]) :])
            where = f" ({self._file}:{theirs[-1].lineno})" if theirs else ""
            text = " ".join(str(error).split())
            reason = f"{type(error).__name__}{text and ': '}{text}"
            listed = "".join(frames.format()) if theirs else ""
            trace = "".join(
                ["Traceback (most recent call last):\n", listed, *traceback.format_exception_only(error)]
            )
            raise UserCodeError(f"training.judge={self._reference} {verb} {reason}{where}", trace) from error


def _shown(value: Any) -> str:
    """A wrong value, as an error message shows it."""
    if value is None or isinstance(value, Number):
        return str(value)
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 40 else text[:40] + '...'}"
