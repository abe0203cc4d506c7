"""Time limits on code that may never return. No torch."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar, cast

from realrl.config.errors import UserCodeError

S = TypeVar("S")
T = TypeVar("T")

MOST_ABANDONED = 8
"""Threads of one reward that may be left behind, each of which goes on taking time and memory."""


class TimeLimitError(UserCodeError):
    """A reward that is not there in time."""


class Deadline:
    """Point in time by which the work on a batch must be done; never, where the limit is None."""

    def __init__(self, limit: float | None) -> None:
        """`limit`: seconds from now."""
        self._end = None if limit is None else time.monotonic() + limit

    @property
    def left(self) -> float | None:
        """Seconds that are left, at least 0; None without a limit."""
        return None if self._end is None else max(self._end - time.monotonic(), 0.0)


class LimitedRunner:
    """Runs tasks within a time limit, in threads that are left behind where they do not return.

    Python cannot end a thread; these are daemons, which do not keep the process from ending.
    """

    def __init__(self, label: str) -> None:
        """`label`: how messages name the reward."""
        self._label = label
        self._abandoned: list[threading.Thread] = []

    def run(self, task: Callable[[], T], limit: float | None) -> T:
        """Run a task: what it returns or raises. TimeLimitError after `limit` seconds."""
        if limit is None:
            return task()
        future: Future[T] = Future()

        def work() -> None:
            try:
                future.set_result(task())
            except BaseException as error:  # whoever waits raises it
                future.set_exception(error)

        thread = threading.Thread(target=work, name=self._label, daemon=True)
        thread.start()
        thread.join(limit)
        if not future.done():
            self._abandoned = [*(old for old in self._abandoned if old.is_alive()), thread]
            raise TimeLimitError(f"{self._label} did not return in time")
        return future.result()

    @property
    def exhausted(self) -> bool:
        """Whether so many threads have been left behind that no further one may be."""
        return len([thread for thread in self._abandoned if thread.is_alive()]) >= MOST_ABANDONED


def map_in_threads(task: Callable[[S], T], items: Sequence[S], threads: int) -> list[T]:
    """Apply a task to items in order, several at a time; what it raises for one is raised once all others are done.

    The threads are daemons: those of an executor keep a process that has failed from ending.
    """
    futures = [Future[T]() for _ in items]
    waiting = iter(list(zip(items, futures, strict=True)))
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                item, future = next(waiting, (None, None))
            if future is None:
                return
            try:
                future.set_result(task(cast(S, item)))
            except BaseException as error:  # whoever waits raises it
                future.set_exception(error)

    started = [threading.Thread(target=work, daemon=True) for _ in range(min(threads, len(items)))]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    return [future.result() for future in futures]
