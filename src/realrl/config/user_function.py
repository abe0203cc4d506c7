"""Functions of the user's that give a number for each completion: finding, calling and checking them."""

import inspect
import math
from collections.abc import Callable, Mapping, Set
from importlib.util import find_spec
from numbers import Number
from typing import Annotated, Any

from pydantic import AfterValidator, ValidationInfo

from realrl.config.errors import UserCodeError, UserError
from realrl.config.explain import brief
from realrl.config.paths import local_path
from realrl.config.user_code import UserCode


class UserFunction:
    """A function that a setting of the recipe names, called and checked."""

    def __init__(self, setting: str, reference: str) -> None:
        """`reference` is `FILE.py:FUNCTION` or `package.module:FUNCTION`; UserError where there is no such
        function, or it is async."""
        self.label = f"{setting}={reference}"
        try:
            resolve_reference(reference)
        except UserError as error:
            raise UserError(f"{self.label}: {error}") from None
        self._code = UserCode(setting, reference)
        function: Any = self._code.attribute(reference.rpartition(":")[2])
        if not callable(function):
            raise UserError(f"{self.label} is no function")
        if _is_async(function):
            raise UserError(f"{self.label} is async; write a plain function")
        self._function: Callable[..., Any] = function
        self._parameters = _parameters(function)

    @property
    def required(self) -> tuple[str, ...]:
        """Arguments that must be given by name."""
        return tuple(
            name
            for name, parameter in (self._parameters or {}).items()
            if parameter.default is parameter.empty and parameter.kind not in _COLLECTING
        )

    @property
    def positional(self) -> tuple[str, ...]:
        """Arguments that cannot be given by name and must be given."""
        parameters = (self._parameters or {}).items()
        return tuple(n for n, p in parameters if p.kind is p.POSITIONAL_ONLY and p.default is p.empty)

    def accepts(self, name: str) -> bool:
        """Tell whether it can be given an argument of that name."""
        if self._parameters is None:
            return True
        if name in self._parameters and self._parameters[name].kind not in _COLLECTING:
            return True
        return any(p.kind is p.VAR_KEYWORD for p in self._parameters.values())

    def numbers(self, count: int, *arguments: Any, **named: Any) -> list[float]:
        """Call it for `count` completions: a finite number for each. UserCodeError where it raises, UserError where
        it gives anything else."""
        with self._code.errors("raised"):
            # What it gives may be a generator, and then this runs the function.
            given = self._function(*arguments, **named)
            values = list(given) if _is_vector(given) else None
        wanted = f"it must give one number for each of {count} completions"
        if isinstance(given, Set | Mapping):
            raise UserCodeError(
                f"{self.label} gave a {type(given).__name__}, whose order is not that of the completions; {wanted},"
                " in their order"
            )
        if values is None:
            raise UserCodeError(f"{self.label} gave {_shown(given)}; {wanted}")
        if len(values) != count:
            raise UserCodeError(
                f"{self.label} gave {len(values)} numbers for {count} completions; it must give one each"
            )
        return [self._number(value, wanted) for value in values]

    def _number(self, value: Any, wanted: str) -> float:
        try:
            # float() would also read texts.
            number = math.nan if isinstance(value, str | bytes) else float(value)
        except (TypeError, ValueError, RuntimeError):
            number = math.nan
        if not math.isfinite(number):
            raise UserCodeError(f"{self.label} gave {_shown(value)} for a completion; {wanted}")
        return number


_COLLECTING = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def resolve_reference(reference: str) -> str:
    """Make the path of `FILE.py:FUNCTION` absolute; `package.module:FUNCTION` stays as it is.

    UserError for any other form, or where there is no such file or package. Nothing is imported.
    """
    source, _, function = reference.rpartition(":")
    if not source or not function.isidentifier():
        raise UserError("write FILE.py:FUNCTION or package.module:FUNCTION")
    if source.endswith(".py"):
        file = local_path(source).resolve()
        if not file.is_file():
            raise UserError(f"there is no file {file}")
        return f"{file}:{function}"
    try:
        found = find_spec(source.partition(".")[0]) is not None
    except ValueError:  # for a name that no package can have
        found = False
    if not found:
        raise UserError(f"there is no module {source}; write FILE.py or package.module")
    return reference


_LONGEST = 300
"""Characters of a reference that an error message repeats: enough for any path that people write."""


def _resolve_setting(reference: str, info: ValidationInfo) -> str:
    try:
        return resolve_reference(reference)
    except UserError as error:
        shown = reference if reference.isprintable() and len(reference) <= _LONGEST else brief(reference)
        raise UserError(f"{info.field_name}={shown}: {error}") from None


FunctionReference = Annotated[str, AfterValidator(_resolve_setting)]
"""Setting that names a function of the user's; the path of its file is absolute once it is read."""


def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter] | None:
    """Find the parameters of a function by name; None where Python does not know them, as of some written in C."""
    try:
        return dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return None


def _is_async(function: Callable[..., Any]) -> bool:
    """Check whether a call gives something to await or to iterate over asynchronously.

    Of an object that is no function, its `__call__` is looked at.
    """
    called = (function, type(function).__call__)
    return any(inspect.iscoroutinefunction(f) or inspect.isasyncgenfunction(f) for f in called)


def _is_vector(given: Any) -> bool:
    """Check whether a value has several values inside: a list, a vector, a generator; not a text, and no number."""
    if isinstance(given, str | bytes) or getattr(given, "ndim", 1) == 0:
        return False
    return hasattr(given, "__iter__")


def _shown(value: Any) -> str:
    """Format a wrong value for an error message."""
    if value is None or isinstance(value, Number):
        return str(value)
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 40 else text[:40] + '...'}"
