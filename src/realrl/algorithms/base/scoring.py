"""Scores of single samples, and time limits on code that may never return. This module does not import torch."""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from realrl.config.errors import UserCodeError, UserError, join

SKIPPED = float("nan")
"""Number in the key `score` for a sample without a score. The loss and all means leave this sample out."""
NOT_APPLICABLE = float("-inf")
"""Score of a mixture's term that does not apply to a sample. Only the other terms then score the sample."""


class UnscoredError(UserCodeError):
    """No answer of a step has a score.

    A train method raises this error without arguments, because it does not know the rewards. The worker adds their
    names.
    """

    def __init__(self, scorers: Sequence[str] = (), answers: int = 0, step: int = 0) -> None:
        """`scorers`: rewards that scored none of the answers. `answers`: their number. `step` counts from 1."""
        which = join(scorers) if scorers else "the reward"
        of = f"all {answers} answers of step {step}" if step else "all answers of the step"
        super().__init__(
            f"{which} gave None, or failed, for {of}, so there is nothing to learn from; failures are above, or in"
            " the log of the rank that met them",
            alone=True,
        )


@dataclass(frozen=True)
class RewardFailure:
    """Why a sample's reward could not be computed."""

    reason: str
    """Text that follows the name of the reward in an error message."""
    trace: str = ""
    """Traceback of the user's code, if this code raised an exception."""


Score = float | None | RewardFailure
"""A finite number, None if the reward does not apply to the sample, or a failure."""

TEXTS = ("prompts", "completions", "completion_ids")
"""Arguments of rewards other than columns of records."""


class Scorer(ABC):
    """A reward that the host computes or asks for: a function, a verifier or a service."""

    label: str
    """Name in messages."""

    @abstractmethod
    def load(self) -> None:
        """Prepare for scoring. Raises UserError if that fails."""

    @abstractmethod
    def wants(self, name: str) -> bool:
        """Return whether the reward reads the argument `name`: one of `TEXTS`, or a column of the records."""

    @property
    @abstractmethod
    def required(self) -> Sequence[str]:
        """Names of the arguments that the reward needs. They are known after `load`."""

    @abstractmethod
    def score(self, count: int, arguments: Mapping[str, list[Any]]) -> list[Score]:
        """Score `count` samples. Every argument has one value per sample.

        Raises UserCodeError if the whole batch fails.
        """

    def check_fields(self, source: str, fields: Collection[str]) -> None:
        """Check that the records of a source have all columns that the reward needs. Raises UserError if not."""
        missing = [name for name in self.required if name not in (*TEXTS, *fields)]
        if not missing:
            return
        known, name = join([*TEXTS[:2], *sorted(fields)]), missing[0]
        copies = f"{{{name}: NAME}} copies a nested field"
        hint = copies if "." in name else f"{{FIELD: {name}}} renames a field"
        raise UserError(
            f"{self.label} needs {name!r}, which no record of {source} has; there are {known};"
            f" data.columns={hint}"
        )

    def state_dict(self) -> Any:
        """Return the state as JSON values; None if there is none."""
        return None

    def load_state_dict(self, state: Any) -> None:  # noqa: B027  # most scorers have no state
        """Restore what `state_dict` returned."""


S = TypeVar("S")
T = TypeVar("T")

MOST_ABANDONED = 8
"""Maximum number of abandoned threads of one reward. Each of them still uses time and memory."""


class TimeLimitError(UserCodeError):
    """A reward exceeds its time limit."""


class Deadline:
    """Time limit of the work on a batch."""

    def __init__(self, limit: float | None) -> None:
        """`limit`: seconds from now; None for no limit."""
        self._end = None if limit is None else time.monotonic() + limit

    @property
    def left(self) -> float | None:
        """Seconds left, at least 0; None without a limit."""
        return None if self._end is None else max(self._end - time.monotonic(), 0.0)


class LimitedRunner:
    """Runs tasks within a time limit, in threads that are abandoned if they do not return.

    Python cannot end a thread. Daemon threads at least let the process exit.
    """

    def __init__(self, label: str) -> None:
        self._label = label
        self._abandoned: list[threading.Thread] = []

    def run(self, task: Callable[[], T], limit: float | None) -> T:
        """Run a task, and return its result or raise its exception. Raises TimeLimitError after `limit` seconds."""
        if limit is None:
            return task()
        future: Future[T] = Future()
        thread = threading.Thread(target=_settle, args=(future, task), name=self._label, daemon=True)
        thread.start()
        thread.join(limit)
        if not future.done():
            self._abandoned = [*(old for old in self._abandoned if old.is_alive()), thread]
            raise TimeLimitError(f"{self._label} did not return in time")
        return future.result()

    @property
    def exhausted(self) -> bool:
        """Whether no more threads may be abandoned."""
        return sum(thread.is_alive() for thread in self._abandoned) >= MOST_ABANDONED


def map_in_threads(task: Callable[[S], T], items: Sequence[S], threads: int) -> list[T]:
    """Apply a task to items in order, several at a time. Raises the first exception after all tasks have ended.

    The threads are daemons, because threads of an executor would keep a failed process alive.
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
            _settle(future, lambda item=item: task(cast(S, item)))  # type: ignore[misc]

    started = [threading.Thread(target=work, daemon=True) for _ in range(min(threads, len(items)))]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    return [future.result() for future in futures]


def _settle(future: Future[T], task: Callable[[], T]) -> None:
    """Run a task, and put its result or exception into the future."""
    try:
        future.set_result(task())
    except BaseException as error:
        future.set_exception(error)
