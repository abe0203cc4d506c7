"""Call the functions of one rank in threads, while the rank continues with its program."""

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue

import torch

from realrl.algorithms.base.method import FunctionInput, FunctionMethod, Metrics
from realrl.config.errors import UserCodeError
from realrl.data.batch import Ragged
from realrl.program.instructions import Run
from realrl.program.text import format_instruction
from realrl.runtime.supervision.heartbeat import Activity
from realrl.runtime.worker.trace import Trace


@dataclass(frozen=True, eq=False)
class Returned:
    """Outputs of a function, and its start and end in seconds of the monotonic clock."""

    outputs: dict[str, Ragged]
    metrics: Metrics
    start: float
    end: float


class Functions:
    """Starts functions in the background, and waits for them.

    Different functions run at the same time. Calls of the same function run one after the other, so a function need
    not be thread-safe.
    """

    def __init__(self, trace: Trace, activity: Activity) -> None:
        self._trace, self._activity = trace, activity
        self._tasks: dict[str, SimpleQueue[Callable[[], None]]] = {}
        self._running: dict[str, Future[Returned]] = {}

    def start(
        self,
        run: Run,
        function: str,
        method: FunctionMethod,
        inputs: FunctionInput,
        details: Mapping[str, object],
    ) -> None:
        """Queue a call in the thread of its function. `function`: the function's reference, such as
        FILE.py:NAME. `details` of the call's slice in the trace."""
        future = self._running[run.call] = Future[Returned]()

        def task() -> None:
            try:
                traced = self._trace.slice(format_instruction(run), host=True, **details)
                with traced, self._activity.run_function(function), torch.no_grad():
                    start = time.monotonic()
                    outputs, metrics = method.call(inputs)
                    end = time.monotonic()
            except UserCodeError as error:
                # The function may have succeeded on other ranks.
                future.set_exception(UserCodeError(str(error), error.trace, alone=True))
            except BaseException as error:  # `collect` raises it
                future.set_exception(error)
            else:
                future.set_result(Returned(outputs, metrics, start, end))

        if function not in self._tasks:
            tasks = self._tasks[function] = SimpleQueue()
            # A daemon thread, so that a function that never returns cannot keep a failed run alive.
            threading.Thread(target=_work, args=(tasks,), name=function, daemon=True).start()
        self._tasks[function].put(task)

    @property
    def running(self) -> tuple[str, ...]:
        """Calls whose functions were started but not collected yet, in the order of their start."""
        return tuple(self._running)

    def collect(self, call: str) -> Returned:
        """Wait for the function of a `running` call, and return its outputs. Raises the error of the function."""
        return self._running.pop(call).result()


def _work(tasks: SimpleQueue[Callable[[], None]]) -> None:
    while True:
        tasks.get()()
