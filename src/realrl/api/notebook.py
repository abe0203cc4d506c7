"""Progress of a run in a notebook: one output of the cell, which is updated in place."""

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import copy_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from realrl.runtime.processes.environment import PROGRESS_VARIABLE

_EVERY = 0.2
"""Seconds between two updates, so that fast steps do not flood the notebook."""


def find_shell() -> Any:
    """Find the shell of IPython, in a terminal or a notebook; None without IPython."""
    return sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None


@contextmanager
def show_progress() -> Iterator[None]:
    """Show the progress of the run that the block trains, in one output of the notebook's cell.

    The run writes its line to a file, whichever process it is in, and a thread shows it. Outside of notebooks,
    nothing happens.
    """
    if getattr(find_shell(), "kernel", None) is None:
        yield
        return
    ended = threading.Event()
    with TemporaryDirectory(prefix="realrl-progress-") as directory:
        file = Path(directory, "line")
        # The output belongs to the cell that runs now, which IPython knows by the context.
        thread = threading.Thread(target=copy_context().run, args=(_follow, file, ended), daemon=True)
        os.environ[PROGRESS_VARIABLE] = str(file)
        thread.start()
        try:
            yield
        finally:
            del os.environ[PROGRESS_VARIABLE]
            ended.set()
            thread.join()


def _follow(file: Path, ended: threading.Event) -> None:
    """Show the line in a file whenever it changes, until `ended` is set."""
    from IPython.display import display

    handle: Any = None
    shown, last = "", False
    while not last:
        last = ended.wait(_EVERY)
        line = file.read_text(encoding="utf-8") if file.exists() else ""
        if line == shown:
            continue
        if handle is None:
            handle = display({"text/plain": line}, raw=True, display_id=True)
        else:
            handle.update({"text/plain": line}, raw=True)
        shown = line
