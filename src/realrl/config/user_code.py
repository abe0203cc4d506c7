"""Python code that a user names in a recipe: its import, and messages for its errors."""

import importlib
import importlib.util
import inspect
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from zlib import crc32

from pydantic import ValidationError

from realrl.config.errors import DescriptionError, UserCodeError, UserError
from realrl.config.explain import explain, find_settings
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
