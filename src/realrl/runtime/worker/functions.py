"""Functions of one rank: a thread of their own calls them while the rank goes on with its program."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue

import torch

from realrl.algorithms.method import FunctionInput, FunctionMethod, Metrics
from realrl.config.errors import UserCodeError
from realrl.data.batch import Ragged
from realrl.program.instructions import Run
from realrl.program.text import format_instruction
from realrl.runtime.worker.trace_recorder import Trace


@dataclass(frozen=True, eq=False)
class Returned:
    """Outputs of a function, and its start and end in seconds of the monotonic clock."""

    outputs: dict[str, Ragged]
    metrics: Metrics
    start: float
    end: float


class Functions:
    """Starts functions in the background, one after the other, and waits for them."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._tasks: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._running: dict[str, Future[Returned]] = {}

    def start(self, run: Run, method: FunctionMethod, inputs: FunctionInput, step: int) -> None:
        """Let the thread call a function once it has ended those before."""
        future = self._running[run.call] = Future[Returned]()

        def task() -> None:
            try:
                with self._trace.slice(format_instruction(run), host=True, step=step), torch.no_grad():
                    start = time.monotonic()
                    outputs, metrics = method.call(inputs)
                    end = time.monotonic()
            except UserCodeError as error:
                # On other ranks it may have succeeded.
                future.set_exception(UserCodeError(str(error), error.trace, alone=True))
            except BaseException as error:  # whoever collects it raises it
                future.set_exception(error)
            else:
                future.set_result(Returned(outputs, metrics, start, end))

        if self._thread is None:
            # A daemon: a function that does not return must not keep a run from ending that has failed.
            self._thread = threading.Thread(target=self._work, name="functions", daemon=True)
            self._thread.start()
        self._tasks.put(task)

    @property
    def running(self) -> tuple[str, ...]:
        """Functions that have been started and not collected, in the order they were started."""
        return tuple(self._running)

    def collect(self, call: str) -> Returned:
        """Wait for a function that is `running`; raises what it has raised."""
        return self._running.pop(call).result()

    def _work(self) -> None:
        while True:
            self._tasks.get()()
