"""Functions of the user's that give a number for each completion: finding, calling and checking them."""

import asyncio
import inspect
import json
import math
from collections.abc import Awaitable, Callable, Mapping, Set
from importlib.util import find_spec
from itertools import islice
from numbers import Number
from typing import Annotated, Any

from pydantic import AfterValidator, ValidationInfo

from realrl.config.errors import UserCodeError, UserError
from realrl.config.explain import brief
from realrl.config.paths import local_path
from realrl.config.user_code import UserCode


class UserFunction:
    """A function that a setting of the recipe names, called and checked."""

    def __init__(self, setting: str, reference: str, *, awaits: bool = False) -> None:
        """`reference` is `FILE.py:FUNCTION` or `package.module:FUNCTION`; UserError where there is no such
        function, or it is async and that is not allowed by `awaits`."""
        self.label = f"{setting}={reference}"
        try:
            resolve_reference(reference)
        except UserError as error:
            raise UserError(f"{self.label}: {error}") from None
        self._code = UserCode(setting, reference)
        function: Any = self._code.attribute(reference.rpartition(":")[2])
        if not callable(function):
            raise UserError(f"{self.label} is no function")
        if _is_async_generator(function):
            raise UserError(f"{self.label} is an async generator; return a list")
        if _is_async(function) and not awaits:
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

    @property
    def first(self) -> str | None:
        """Argument that the first value without a name goes to; None if there is none, or Python does not know."""
        kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
        parameters = (self._parameters or {}).items()
        return next((name for name, parameter in parameters if parameter.kind not in kinds), None)

    @property
    def has_signature(self) -> bool:
        """Whether Python knows its arguments, which it does not for some functions written in C."""
        return self._parameters is not None

    def names(self, name: str) -> bool:
        """Tell whether it lists an argument of that name that can be given by name."""
        parameter = (self._parameters or {}).get(name)
        return parameter is not None and parameter.kind not in (*_COLLECTING, parameter.POSITIONAL_ONLY)

    def accepts(self, name: str) -> bool:
        """Tell whether it can be given an argument of that name."""
        if self._parameters is None:
            return True
        if name in self._parameters and self._parameters[name].kind not in _COLLECTING:
            return True
        return any(p.kind is p.VAR_KEYWORD for p in self._parameters.values())

    def state_dict(self) -> Any:
        """Save what it keeps, where it is an object with `state_dict` and `load_state_dict`; else None.

        UserCodeError where that raises, or gives anything but JSON values.
        """
        if not all(
            callable(getattr(self._function, name, None)) for name in ("state_dict", "load_state_dict")
        ):
            return None
        function: Any = self._function
        with self._code.errors("raised in state_dict:"):
            state = function.state_dict()
        try:
            json.dumps(state)
        except (TypeError, ValueError, RecursionError):
            raise UserCodeError(
                f"{self.label}: state_dict gave {show(state)}; it must give JSON values"
            ) from None
        return state

    def load_state_dict(self, state: Any) -> None:
        """Load what `state_dict` saved; UserCodeError where that raises."""
        function: Any = self._function
        with self._code.errors("raised in load_state_dict:"):
            function.load_state_dict(state)

    def numbers(self, count: int, *arguments: Any, **named: Any) -> list[float]:
        """Call it for `count` completions: a finite number for each. UserCodeError where it raises, or gives
        anything else."""
        numbers = []
        for value in self.values(count, *arguments, **named):
            number = read_number(value)
            if number is None:
                raise UserCodeError(f"{self.label} {describe_no_number(value, count)}")
            numbers.append(number)
        return numbers

    def values(self, count: int, *arguments: Any, **named: Any) -> list[Any]:
        """Call it for `count` completions: any value for each. UserCodeError where it raises, or gives anything but
        so many. An async function runs in an event loop of its own."""
        with self._code.errors("raised"):
            given = self._function(*arguments, **named)
            if inspect.isawaitable(given):
                given = asyncio.run(_wait(given))
            # It may be a generator, and then this runs the function; one without an end is cut.
            values = list(islice(given, count + 1)) if _is_vector(given) else None
            endless = inspect.isgenerator(given)
        wanted = f"it must give one number for each of {count} completions"
        if isinstance(given, Set | Mapping):
            raise UserCodeError(
                f"{self.label} gave a {type(given).__name__}, whose order is not that of the completions; {wanted},"
                " in their order"
            )
        if values is None:
            raise UserCodeError(f"{self.label} gave {show(given)}; {wanted}")
        if len(values) != count:
            more = f"more than {count}" if endless else str(_length(given, len(values)))
            found = more if len(values) > count else str(len(values))
            raise UserCodeError(
                f"{self.label} gave {found} numbers for {count} completions; it must give one each"
            )
        return values


async def _wait(given: Awaitable[Any]) -> Any:
    return await given


def _length(given: Any, counted: int) -> int:
    """Number of values, where it says so."""
    try:
        return len(given)
    except Exception:  # whatever class the user has made
        return counted


def read_number(value: Any) -> float | None:
    """Read a value as a number; None unless it is a finite one."""
    try:
        # float() would also read texts.
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except Exception:  # whatever class the user has made
        return None
    return number if math.isfinite(number) else None


def describe_no_number(value: Any, count: int) -> str:
    """Describe what a function gave for one of `count` completions that is no number."""
    return f"gave {show(value)} for a completion; it must give one number for each of {count} completions"


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


def resolve_setting(reference: str, setting: str) -> str:
    """Make a reference absolute, see `resolve_reference`; UserError, which names the setting, likewise."""
    try:
        return resolve_reference(reference)
    except UserError as error:
        shown = reference if reference.isprintable() and len(reference) <= _LONGEST else brief(reference)
        raise UserError(f"{setting}={shown}: {error}") from None


def _resolve_field(reference: str, info: ValidationInfo) -> str:
    return resolve_setting(reference, info.field_name or "")


FunctionReference = Annotated[str, AfterValidator(_resolve_field)]
"""Setting that names a function of the user's; the path of its file is absolute once it is read."""


def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter] | None:
    """Find the parameters of a function by name; None where Python does not know them, as of some written in C."""
    try:
        return dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return None


def _is_async(function: Callable[..., Any]) -> bool:
    """Check whether a call gives something to await: of a function, or an object's `__call__`."""
    return any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))


def _is_async_generator(function: Callable[..., Any]) -> bool:
    """Check whether a call gives something to iterate over asynchronously."""
    return any(map(inspect.isasyncgenfunction, (function, type(function).__call__)))


def _is_vector(given: Any) -> bool:
    """Check whether a value has several values inside: a list, a vector, a generator; not a text, and no number."""
    if isinstance(given, str | bytes) or getattr(given, "ndim", 1) == 0:
        return False
    return hasattr(given, "__iter__")


def show(value: Any) -> str:
    """Format a wrong value for an error message."""
    try:
        text = str(value) if value is None or isinstance(value, Number) else repr(value)
    except Exception:  # whatever class the user has made, or a number of too many digits
        return f"a {type(value).__name__}"
    if value is None or isinstance(value, Number):
        return text if len(text) <= 40 else text[:40] + "..."
    return f"{type(value).__name__} {text if len(text) <= 40 else text[:40] + '...'}"
