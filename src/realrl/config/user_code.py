"""Python code that a user names in a recipe: its import, and messages for its errors."""

import asyncio
import importlib
import importlib.util
import inspect
import json
import math
import signal
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import islice
from numbers import Number
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any
from zlib import crc32

from pydantic import AfterValidator, ValidationError, ValidationInfo

from realrl.config.errors import DescriptionError, UserCodeError, UserError
from realrl.config.explain import brief, explain, find_settings
from realrl.config.paths import local_path


class UserCode:
    """A Python module of the user, named by a setting of the recipe as `FILE.py` or `package.module`."""

    def __init__(self, setting: str, reference: str) -> None:
        """Import the module. `setting` and `reference` are how error messages name it, for example
        `evaluation.judge` and `judge.py:rate`; what follows a last colon of the reference is not looked at.

        UserError where there is no such module, UserCodeError where it cannot be imported.
        """
        self.label = f"{setting}={reference}"
        """The setting and its value, as error messages name them."""
        source = reference.rpartition(":")[0] or reference
        self.file: Path | None = local_path(source).resolve() if source.endswith(".py") else None
        self.module = self._import(source)

    def _import(self, source: str) -> ModuleType:
        if self.file is None:
            with self.errors("cannot be imported:"):
                found = _is_module(source)
            if not found:
                raise UserError(f"{self.label}: there is no module {source}; write FILE.py or package.module")
            with self.errors("cannot be imported:"):
                module = importlib.import_module(source)
            self.file = Path(module.__file__).resolve() if module.__file__ else None
            return module
        if not self.file.is_file():
            raise UserError(f"{self.label}: there is no file {self.file}")
        spec = importlib.util.spec_from_file_location(_module_name(self.file), self.file)
        assert spec is not None and spec.loader is not None, "a .py file has a loader"
        if spec.name in sys.modules:
            return sys.modules[spec.name]
        module = importlib.util.module_from_spec(spec)
        # Where else dataclasses and pickle look for it.
        sys.modules[spec.name] = module
        try:
            with self.errors("cannot be imported:"):
                spec.loader.exec_module(module)
        except UserError:
            del sys.modules[spec.name]
            raise
        return module

    def attribute(self, name: str) -> Any:
        """Find an attribute of the module; UserError where it has none of that name."""
        if not hasattr(self.module, name):
            raise UserError(f"{self.label}: {self.file or self.module.__name__} has no {name}")
        return getattr(self.module, name)

    @contextmanager
    def errors(
        self,
        verb: str,
        passing: tuple[type[Exception], ...] = (),
        *,
        function: Callable[..., Any] | None = None,
        alone: bool = False,
    ) -> Iterator[None]:
        """Turn errors that the user's code raises in the block into a UserCodeError that names its line.

        A DescriptionError, which the package raises, and values that its settings do not have, become a UserError
        that names the line instead.
        `verb` is what the code did, for example `raised`. Errors of the types `passing` are left as they are.
        `function` is what the block calls, where that may be defined in another file of the user's; `alone`: see
        UserCodeError.
        """
        defined = None if function is None else find_definition(function)
        files = {self.file, None if defined is None else defined[0]}
        try:
            yield
        except passing:
            raise
        except BaseException as error:  # whatever the user's code does
            if _may_be_signal(error):
                raise
            mistake = _describe_mistake(error)
            if mistake is not None:
                theirs = _frames_in(files, traceback.extract_tb(error.__traceback__))
                where = _format_place(theirs[-1]) if theirs else self.label
                raise UserError(f"{where}: {mistake}") from None
            # The first frame is ours, and for an import so are some more.
            frames = traceback.extract_tb(error.__traceback__)
            theirs = _frames_in(files, frames)
            if theirs:
                frames = traceback.StackSummary.from_list(frames[frames.index(theirs[0]) :])
            where = f" ({_format_place(theirs[-1])})" if theirs else ""
            text = " ".join(_read_message(error).split())
            reason = f"{type(error).__name__}{text and ': '}{text}"
            listed = "".join(frames.format()) if theirs else ""
            trace = "".join(
                ["Traceback (most recent call last):\n", listed, *traceback.format_exception_only(error)]
            )
            raise UserCodeError(f"{self.label} {verb} {reason}{where}", trace, alone) from error


def find_definition(function: Callable[..., Any]) -> tuple[Path, int] | None:
    """Find the file and line where a function or method is defined; None where Python does not say."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return None if code is None else (Path(code.co_filename).resolve(), code.co_firstlineno)


def is_own_module(name: str | None) -> bool:
    """Check whether a module is one of this package."""
    return name is not None and name.partition(".")[0] == __name__.partition(".")[0]


def find_source(reference: str) -> Path | None:
    """Find the file of `FILE.py` or `package.module`, with or without `:FUNCTION`; None where there is none.

    No more than the packages around a module is imported.
    """
    source = reference.rpartition(":")[0] or reference
    if source.endswith(".py"):
        return local_path(source)
    try:
        found = importlib.util.find_spec(source)
    except (Exception, SystemExit):  # of the packages around it; who imports the module itself says so
        return None
    return Path(found.origin) if found is not None and found.has_location and found.origin else None


def _describe_mistake(error: BaseException) -> str | None:
    """Say what is wrong with what the user describes in terms of the package; None for any other error."""
    if isinstance(error, ValidationError) and (cls := find_settings(error.title)) is not None:
        return f"{error.title}: {explain(error, cls)}"
    return str(error) if isinstance(error, DescriptionError) else None


def _read_message(error: BaseException) -> str:
    """Text of an exception; empty where its class fails to give one."""
    try:
        return str(error)
    except Exception:  # whatever class the user has made
        return ""


def _frames_in(files: Set[Path | None], frames: traceback.StackSummary) -> list[traceback.FrameSummary]:
    return [frame for frame in frames if Path(frame.filename).resolve() in files]


def _format_place(frame: traceback.FrameSummary) -> str:
    return f"{Path(frame.filename).resolve()}:{frame.lineno}"


def _may_be_signal(error: BaseException) -> bool:
    """Tell whether an exception may come from a signal, such as that of the keyboard.

    Python calls handlers in the main thread alone: its own raises KeyboardInterrupt, those of a run something else.
    """
    if threading.current_thread() is not threading.main_thread():
        return False
    if isinstance(error, KeyboardInterrupt):
        return signal.getsignal(signal.SIGINT) is signal.default_int_handler
    return not isinstance(error, Exception | SystemExit)


def _is_module(name: str) -> bool:
    """Check whether there is a module of that name. Importing the packages around it may raise anything."""
    try:
        return importlib.util.find_spec(name) is not None
    except ValueError:
        return False
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            return False
        raise


def _module_name(file: Path) -> str:
    """Make a module name that is unique to the file: files in different folders may share a name."""
    return f"realrl_user_{crc32(str(file).encode()):08x}_{file.stem}"


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
