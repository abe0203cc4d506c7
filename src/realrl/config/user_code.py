"""Python code that a recipe names: its import, messages for its errors, and functions that return numbers."""

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
from contextlib import AbstractContextManager, contextmanager
from functools import partial
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

SCRIPT_MODULE = "realrl_objects"
"""Module in memory with the functions that a script or notebook has passed to realrl."""


def name_function(reference: str) -> str:
    """Name a function in messages. A function of a script has its own name, without the module in memory."""
    module, _, name = reference.partition(":")
    return name.rpartition("_")[0] if module == SCRIPT_MODULE else reference


class UserCode:
    """A user's Python module, which a setting names as `FILE.py` or `package.module`."""

    def __init__(self, setting: str, reference: str) -> None:
        """Import the module. Text after the last colon of `reference` is ignored.

        Error messages contain `setting` and `reference`, for example `evaluation.judge` and `judge.py:rate`.

        Raises UserError if there is no such module, and UserCodeError if it cannot be imported.
        """
        self.label = f"{setting}={name_function(reference)}"
        """The setting and its value, for error messages."""
        source = reference.rpartition(":")[0] or reference
        self.file: Path | None = local_path(source).resolve() if source.endswith(".py") else None
        self.module = self._import(source)

    def _import(self, source: str) -> ModuleType:
        if self.file is None:
            with self.errors("cannot be imported:"):
                module = importlib.import_module(source) if _is_module(source) else None
            if module is None and source == SCRIPT_MODULE:
                raise UserError(
                    f"{self.label} is a function of the script that started the run; run this script, or name a"
                    " function as FILE.py:FUNCTION"
                )
            if module is None:
                raise UserError(f"{self.label}: there is no module {source}; write FILE.py or package.module")
            self.file = Path(module.__file__).resolve() if module.__file__ else None
            return module
        if not self.file.is_file():
            raise UserError(f"{self.label}: there is no file {self.file}")
        # Files in different folders may share a name.
        name = f"realrl_user_{crc32(str(self.file).encode()):08x}_{self.file.stem}"
        spec = importlib.util.spec_from_file_location(name, self.file)
        assert spec is not None and spec.loader is not None, "a .py file has a loader"
        if spec.name in sys.modules:
            return sys.modules[spec.name]
        module = importlib.util.module_from_spec(spec)
        # dataclasses and pickle look up the module here.
        sys.modules[spec.name] = module
        try:
            with self.errors("cannot be imported:"):
                spec.loader.exec_module(module)
        except UserError:
            del sys.modules[spec.name]
            raise
        return module

    def attribute(self, name: str) -> Any:
        """Find an attribute of the module. Raises UserError if it does not exist."""
        if not hasattr(self.module, name):
            raise UserError(f"{self.label}: {self.file or self.module.__name__} has no {name}")
        return getattr(self.module, name)

    def errors(
        self,
        verb: str,
        passing: tuple[type[Exception], ...] = (),
        *,
        function: Callable[..., Any] | None = None,
        alone: bool = False,
    ) -> AbstractContextManager[None]:
        """Turn errors of the module's code in the block into a UserCodeError, see `user_errors`."""
        return user_errors(self.label, verb, passing=passing, file=self.file, function=function, alone=alone)


@contextmanager
def user_errors(
    label: str,
    verb: str,
    *,
    passing: tuple[type[Exception], ...] = (),
    file: Path | None = None,
    function: Callable[..., Any] | None = None,
    alone: bool = False,
) -> Iterator[None]:
    """Turn errors of the user's code in the block into a UserCodeError with file and line.

    A DescriptionError and wrong values of settings become a UserError with file and line instead. `label`
    and `verb` begin the message, for example `evaluation.judge=judge.py:rate` and `raised`. Errors of the types
    `passing` stay unchanged. `file` and `function`: the user's file, and the function that the block calls, which
    may be in another file. `alone`: see `UserCodeError`.
    """
    defined = None if function is None else find_definition(function)
    files = {file, None if defined is None else defined[0]}
    try:
        yield
    except passing:
        raise
    except BaseException as error:  # the user's code may raise anything
        if _may_be_signal(error):
            raise
        frames = traceback.extract_tb(error.__traceback__)
        theirs = [frame for frame in frames if Path(frame.filename).resolve() in files]
        place = _name_place(theirs[-1]) if theirs else ""
        mistake = _describe_mistake(error)
        if mistake is not None:
            raise UserError(f"{place or label}: {mistake}") from None
        listed = ""
        if theirs:  # the first frames belong to this package
            listed = "".join(traceback.StackSummary.from_list(frames[frames.index(theirs[0]) :]).format())
        where = place and f" ({place})"
        text = " ".join(_read_message(error).split())
        reason = f"{type(error).__name__}{text and ': '}{text}"
        trace = "".join(
            ["Traceback (most recent call last):\n", listed, *traceback.format_exception_only(error)]
        )
        raise UserCodeError(f"{label} {verb} {reason}{where}", trace, alone) from error


def _name_place(frame: traceback.FrameSummary) -> str:
    """Name the file and line of a frame. A function that came from another process may have lost its file."""
    if frame.filename.startswith("<"):
        return f"line {frame.lineno} of the script"
    return f"{Path(frame.filename).resolve()}:{frame.lineno}"


def find_definition(function: Callable[..., Any]) -> tuple[Path, int] | None:
    """Find the file and line of the definition of a function, a partial or a callable object; None if Python does
    not know it."""
    while isinstance(function, partial):
        function = function.func
    function = inspect.unwrap(function)
    if not hasattr(function, "__code__"):
        function = type(function).__call__  # of a callable object
    code = getattr(function, "__code__", None)
    return None if code is None else (Path(code.co_filename).resolve(), code.co_firstlineno)


def is_own_module(name: str | None) -> bool:
    """Check whether a module belongs to this package."""
    return name is not None and name.partition(".")[0] == __name__.partition(".")[0]


def find_source(reference: str) -> Path | None:
    """Find the file of `FILE.py` or `package.module`, with or without `:FUNCTION`; None if there is none.

    Only the packages around a module are imported.
    """
    source = reference.rpartition(":")[0] or reference
    if source.endswith(".py"):
        return local_path(source)
    try:
        found = importlib.util.find_spec(source)
    except (Exception, SystemExit):  # the import of the module itself reports this error
        return None
    return Path(found.origin) if found is not None and found.has_location and found.origin else None


def _describe_mistake(error: BaseException) -> str | None:
    """Describe an error that comes from wrong use of this package by the user's code; None for any other error."""
    if isinstance(error, ValidationError) and (cls := find_settings(error.title)) is not None:
        return f"{error.title}: {explain(error, cls)}"
    return str(error) if isinstance(error, DescriptionError) else None


def _read_message(error: BaseException) -> str:
    """Return the text of an exception. It is empty if the exception's class cannot produce a text."""
    try:
        return str(error)
    except Exception:  # a user's class may raise anything
        return ""


def _may_be_signal(error: BaseException) -> bool:
    """Return whether an exception may come from a signal handler, such as Ctrl-C's.

    Python calls handlers only in the main thread. Python's own handler raises KeyboardInterrupt; ours raise other
    types.
    """
    if threading.current_thread() is not threading.main_thread():
        return False
    if isinstance(error, KeyboardInterrupt):
        return signal.getsignal(signal.SIGINT) is signal.default_int_handler
    return not isinstance(error, Exception | SystemExit)


def _is_module(name: str) -> bool:
    """Check whether a module exists. Importing the packages around it may raise anything."""
    try:
        return importlib.util.find_spec(name) is not None
    except ValueError:
        return False
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            return False
        raise


class UserFunction:
    """A user's function that a setting names. Its results are checked after each call."""

    def __init__(self, setting: str, reference: str, *, awaits: bool = False) -> None:
        """`reference` is `FILE.py:FUNCTION` or `package.module:FUNCTION`.

        Raises UserError if there is no such function, or if it is async although `awaits` is false."""
        self.label = f"{setting}={name_function(reference)}"
        try:
            resolve_reference(reference)
        except UserError as error:
            raise UserError(f"{self.label}: {error}") from None
        self._code = UserCode(setting, reference)
        function: Any = self._code.attribute(reference.rpartition(":")[2])
        if not callable(function):
            raise UserError(f"{self.label} is not a function")
        called = (function, type(function).__call__)  # a function, or an object with `__call__`
        if any(map(inspect.isasyncgenfunction, called)):
            raise UserError(f"{self.label} is an async generator; return a list")
        if any(map(inspect.iscoroutinefunction, called)) and not awaits:
            raise UserError(f"{self.label} is async; write a plain function")
        self.function = function
        self.has_signature, self._parameters = True, dict[str, inspect.Parameter]()
        """Whether Python knows the function's arguments. For some functions written in C, it does not."""
        try:
            self._parameters = dict(inspect.signature(function).parameters)
        except (TypeError, ValueError):
            self.has_signature = False

    @property
    def required(self) -> tuple[str, ...]:
        """Arguments that must be given by name."""
        parameters = self._parameters.items()
        return tuple(n for n, p in parameters if p.default is p.empty and p.kind not in _COLLECTING)

    @property
    def positional(self) -> tuple[str, ...]:
        """Required arguments that cannot be given by name."""
        parameters = self._parameters.items()
        return tuple(n for n, p in parameters if p.kind is p.POSITIONAL_ONLY and p.default is p.empty)

    @property
    def first(self) -> str | None:
        """Argument that receives the first value without a name; None if there is none, or if it is unknown."""
        kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
        return next((name for name, p in self._parameters.items() if p.kind not in kinds), None)

    def names(self, name: str) -> bool:
        """Return whether the function has an argument with this name that can be given by name."""
        parameter = self._parameters.get(name)
        return parameter is not None and parameter.kind not in (*_COLLECTING, parameter.POSITIONAL_ONLY)

    def accepts(self, name: str) -> bool:
        """Return whether the function takes an argument with this name."""
        if name in self._parameters and self._parameters[name].kind not in _COLLECTING:
            return True
        takes_any = any(p.kind is p.VAR_KEYWORD for p in self._parameters.values())
        return takes_any or not self.has_signature

    def state_dict(self) -> Any:
        """Return the state of an object with `state_dict` and `load_state_dict`; None for a plain function.

        Raises UserCodeError if `state_dict` raises, or returns anything except JSON values.
        """
        functions = ("state_dict", "load_state_dict")
        if not all(callable(getattr(self.function, name, None)) for name in functions):
            return None
        with self._code.errors("raised in state_dict:"):
            state = self.function.state_dict()
        try:
            json.dumps(state)
        except (TypeError, ValueError, RecursionError):
            raise UserCodeError(
                f"{self.label}: state_dict gave {show(state)}; it must give JSON values"
            ) from None
        return state

    def load_state_dict(self, state: Any) -> None:
        """Load a state from `state_dict`. Raises UserCodeError if the object's `load_state_dict` raises."""
        with self._code.errors("raised in load_state_dict:"):
            self.function.load_state_dict(state)

    def numbers(self, count: int, *arguments: Any, **named: Any) -> list[float]:
        """Call the function for `count` completions. Returns one finite number for each completion.

        Raises UserCodeError if the function raises, or returns anything else."""
        numbers = []
        for value in self.values(count, *arguments, **named):
            number = read_number(value)
            if number is None:
                raise UserCodeError(f"{self.label} {describe_no_number(value, count)}")
            numbers.append(number)
        return numbers

    def values(self, count: int, *arguments: Any, **named: Any) -> list[Any]:
        """Call the function for `count` completions. Returns one value of any type for each completion.

        An async function runs in its own event loop. Raises UserCodeError if the function raises, or returns
        another number of values."""
        with self._code.errors("raised", function=self.function):
            given = self.function(*arguments, **named)
            if inspect.isawaitable(given):
                given = asyncio.run(_wait(given))
            # For a generator, this runs the function; an endless generator is cut.
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
    """Return the length of `given`, or `counted` if it has no length."""
    try:
        return len(given)
    except Exception:  # a user's class may raise anything
        return counted


def read_number(value: Any) -> float | None:
    """Convert a value to a number; None if it is not a finite number."""
    try:
        # float() would also accept text.
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except Exception:  # a user's class may raise anything
        return None
    return number if math.isfinite(number) else None


def describe_no_number(value: Any, count: int) -> str:
    """Describe a function's result for one of `count` completions that is not a number."""
    return f"gave {show(value)} for a completion; it must give one number for each of {count} completions"


_COLLECTING = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def resolve_reference(reference: str) -> str:
    """Make the path of `FILE.py:FUNCTION` absolute; `package.module:FUNCTION` stays unchanged.

    Nothing is imported. Raises UserError for any other form, or a missing file or package.
    """
    source, _, function = reference.rpartition(":")
    if not source or not function.isidentifier():
        raise UserError("write FILE.py:FUNCTION or package.module:FUNCTION")
    if source.endswith(".py"):
        file = local_path(source).resolve()
        if not file.is_file():
            raise UserError(f"there is no file {file}")
        return f"{file}:{function}"
    # The directory of a run can be read without the script; only a call needs the function.
    if source != SCRIPT_MODULE and not _is_module(source.partition(".")[0]):
        raise UserError(f"there is no module {source}; write FILE.py or package.module")
    return reference


_LONGEST = 300
"""Maximum characters of a reference in an error message."""


def resolve_setting(reference: str, setting: str) -> str:
    """Make a reference absolute, see `resolve_reference`. Raises UserError with the setting's name."""
    try:
        return resolve_reference(reference)
    except UserError as error:
        shown = reference if reference.isprintable() and len(reference) <= _LONGEST else brief(reference)
        raise UserError(f"{setting}={shown}: {error}") from None


def _resolve_field(reference: str, info: ValidationInfo) -> str:
    return resolve_setting(reference, info.field_name or "")


FunctionReference = Annotated[str, AfterValidator(_resolve_field)]
"""Setting that names a user's function. The path of the function's file becomes absolute."""


def _is_vector(given: Any) -> bool:
    """Check whether a value is a collection, such as a list, a vector or a generator, but not text."""
    if isinstance(given, str | bytes) or getattr(given, "ndim", 1) == 0:
        return False
    return hasattr(given, "__iter__")


def show(value: Any) -> str:
    try:
        text = str(value) if value is None or isinstance(value, Number) else repr(value)
    except Exception:  # a user's class may raise anything, and so may a huge number
        return f"a {type(value).__name__}"
    text = text if len(text) <= 40 else f"{text[:40]}..."
    return text if value is None or isinstance(value, Number) else f"{type(value).__name__} {text}"
