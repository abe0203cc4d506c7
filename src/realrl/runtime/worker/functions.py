"""Functions of one rank: threads of their own call them while the rank goes on with its program."""

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
from realrl.runtime.supervision.heartbeat import Activity
from realrl.runtime.worker.trace_recorder import Trace


@dataclass(frozen=True, eq=False)
class Returned:
    """Outputs of a function, and its start and end in seconds of the monotonic clock."""

    outputs: dict[str, Ragged]
    metrics: Metrics
    start: float
    end: float


class Functions:
    """Starts functions in the background, and waits for them.

    Different ones run at the same time; calls of one function follow one another, so that it need not be prepared
    for several threads.
    """

    def __init__(self, trace: Trace, activity: Activity) -> None:
        self._trace, self._activity = trace, activity
        self._tasks: dict[str, SimpleQueue[Callable[[], None]]] = {}
        self._running: dict[str, Future[Returned]] = {}

    def start(
        self, run: Run, function: str, method: FunctionMethod, inputs: FunctionInput, step: int
    ) -> None:
        """Let a thread make a call of `function`, a reference, once it has ended those before."""
        future = self._running[run.call] = Future[Returned]()

        def task() -> None:
            try:
                traced = self._trace.slice(format_instruction(run), host=True, step=step)
                with traced, self._activity.run_function(function), torch.no_grad():
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

        if function not in self._tasks:
            tasks = self._tasks[function] = SimpleQueue()
            # A daemon: a function that does not return must not keep a run from ending that has failed.
            threading.Thread(target=_work, args=(tasks,), name=function, daemon=True).start()
        self._tasks[function].put(task)

    @property
    def running(self) -> tuple[str, ...]:
        """Functions that have been started and not collected, in the order they were started."""
        return tuple(self._running)

    def collect(self, call: str) -> Returned:
        """Wait for a function that is `running`; raises what it has raised."""
        return self._running.pop(call).result()


def _work(tasks: SimpleQueue[Callable[[], None]]) -> None:
    while True:
        tasks.get()()
