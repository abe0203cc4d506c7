"""Pool of processes that hold the objects of an environment, and the requests to them.

The user's code runs in other processes, so it cannot disturb the process of a rank: it may raise, hang, print, or
end its process.
"""

import itertools
import json
import math
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from realrl.config.errors import UserError
from realrl.config.script_objects import OBJECTS_VARIABLE, find_objects, pack_objects
from realrl.config.user_code import name_function
from realrl.environments.objects import SETTING
from realrl.recipe.environment import CALLS_AT_ONCE, EnvironmentConfig

_START_SECONDS = 300.0
"""Maximum seconds until a process has imported the user's code."""
_MOST_THREADS = 4096
"""Maximum number of threads of a process. An agent has one during its whole trajectory."""
_CHARACTERS = 16
"""Maximum characters of an observation that are kept, for each token of its limit."""

_LOST = "lost its process to another trajectory"


@dataclass(frozen=True)
class Failure:
    """Why a request has no answer.

    `own` is false if another trajectory of the same process may be to blame. `suspect` says that this one may be,
    too: its process ended while several calls ran. `raised`: whether the user's code raised an exception.
    """

    reason: str
    trace: str = ""
    own: bool = True
    suspect: bool = False
    raised: bool = False


Answer = Mapping[str, Any] | Failure


@dataclass(eq=False)
class _Request:
    content: dict[str, Any]
    answer: Callable[[Answer], None]
    alone: bool = False
    """Whether nothing else may run in the process meanwhile, so that it is clear who ends it."""
    due: float = 0.0
    """When it must be answered; infinite while an agent waits for the model."""
    left: float = 0.0
    """Seconds that were left when the agent began to wait."""


@dataclass(eq=False)
class _Worker:
    """A process of the pool, with the requests that wait for it and those that it works on."""

    process: subprocess.Popen[str]
    waiting: deque[_Request] = field(default_factory=deque)
    running: dict[int, _Request] = field(default_factory=dict)
    outbox: "queue.SimpleQueue[str | None]" = field(default_factory=queue.SimpleQueue)
    """Lines for the process, and None at the end. A thread writes them, because a process that hangs reads none."""
    ready: bool = False
    due: float = 0.0
    """When the process must have started."""
    trajectories: dict[int, bool] = field(default_factory=dict)
    """Trajectories whose objects the process holds, and whether their calls run alone."""


class EnvironmentPool:
    """Objects of an environment in processes of their own. Every trajectory has one object.

    Answers arrive in a thread of the pool.
    """

    def __init__(self, config: EnvironmentConfig, form: str) -> None:
        """`form` is the format of tool calls. Processes start with the first request to them."""
        self._config, self._form = config, form
        self.label = f"{SETTING}={name_function(config.factory)}"
        self._lock = threading.RLock()
        self._workers: list[_Worker | None] = [None] * config.workers
        self._place: dict[int, int] = {}
        """Number of the worker that holds the object of each trajectory."""
        self._numbers = itertools.count()
        self._closed = threading.Event()
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        """Folder with the class of a script, for the processes."""
        self._described: dict[str, Any] | None = None
        threading.Thread(target=self._watch, name="realrl-environments", daemon=True).start()

    def describe(self) -> Mapping[str, Any]:
        """Describe the objects, see `Factory.describe`. Raises UserError if they cannot be used."""
        if self._described is None:
            answers: queue.Queue[Answer] = queue.Queue()
            with self._lock:
                self._ask(0, self._find_worker(0), {"do": "describe"}, answers.put)
            answer = answers.get()
            if isinstance(answer, Failure):
                reason = answer.reason
                raise UserError(reason if reason.startswith(self.label) else f"{self.label} {reason}")
            self._described = answer["described"]
        assert self._described is not None
        return self._described

    def reset(
        self, trajectory: int, record: Mapping[str, Any], answer: Callable[[Answer], None], *, alone: bool
    ) -> None:
        """Make an object for a trajectory, and start it with the fields of a record.

        `alone`: whether the calls of this object run while no other call runs in its process.
        """
        assert self._described is not None, "described before the first trajectory"
        self._begin(trajectory, record, {"do": "reset", "tools": self._described["tools"]}, answer, alone)

    def run(
        self,
        trajectory: int,
        record: Mapping[str, Any],
        connection: Mapping[str, str],
        answer: Callable[[Answer], None],
        *,
        alone: bool,
    ) -> None:
        """Make an agent for a trajectory, and run it until the trajectory ends.

        `connection`: further arguments of `run`, with which the agent reaches the model. Its time limit does not
        count while it waits for the model, see `hold`. `alone` as for `reset`.
        """
        self._begin(trajectory, record, {"do": "run", "connection": dict(connection)}, answer, alone)

    def hold(self, trajectory: int) -> None:
        """Stop the clock of an agent, which waits for the model."""
        with self._lock:
            for request in self._list_running(trajectory):
                request.left, request.due = request.due - time.monotonic(), math.inf

    def release(self, trajectory: int, *, anew: bool) -> None:
        """Let the clock of an agent run again. `anew`: whether it has the whole time again, as after an answer."""
        with self._lock:
            for request in self._list_running(trajectory):
                request.due = time.monotonic() + (self._config.timeout if anew else request.left)

    def _list_running(self, trajectory: int) -> list[_Request]:
        """List the requests about a trajectory that its process works on."""
        worker = self._workers[self._place[trajectory]] if trajectory in self._place else None
        running = worker.running.values() if worker is not None else ()
        return [request for request in running if request.content.get("trajectory") == trajectory]

    def _begin(
        self,
        trajectory: int,
        record: Mapping[str, Any],
        request: dict[str, Any],
        answer: Callable[[Answer], None],
        alone: bool,
    ) -> None:
        for name, value in record.items():
            if not _is_json(value):
                answer(
                    Failure(f"cannot get the field {name!r}: a {type(value).__name__} is not a value of JSON")
                )
                return
        with self._lock:
            loads = [len(worker.trajectories) if worker else 0 for worker in self._workers]
            number = loads.index(min(loads))
            self._place[trajectory] = number
            worker = self._find_worker(number)
            worker.trajectories[trajectory] = alone
            self._ask(number, worker, {**request, "trajectory": trajectory, "record": dict(record)}, answer)

    def act(self, trajectory: int, text: str, last: bool, answer: Callable[[Answer], None]) -> None:
        """Let the object of a trajectory answer a turn. `last`: whether the trajectory ends with this turn."""
        self._ask_object(trajectory, {"do": "act", "text": text, "last": last}, answer)

    def end(self, trajectory: int, answer: Callable[[Answer], None]) -> None:
        """End a trajectory after its last reply, and ask for its reward."""
        self._ask_object(trajectory, {"do": "end"}, answer)

    def _ask_object(self, trajectory: int, content: dict[str, Any], answer: Callable[[Answer], None]) -> None:
        with self._lock:
            number = self._place[trajectory]
            worker = self._workers[number]
            if worker is None or trajectory not in worker.trajectories:
                answer(Failure(_LOST, own=False))
                return
            self._ask(number, worker, {**content, "trajectory": trajectory}, answer)

    def drop(self, trajectory: int, *, close: bool) -> None:
        """Forget a trajectory. `close`: whether its object has not ended by itself, and is to be closed."""
        with self._lock:
            number = self._place.pop(trajectory, None)
            worker = None if number is None else self._workers[number]
            if number is not None and worker is not None and trajectory in worker.trajectories:
                if close:
                    self._ask(number, worker, {"do": "close", "trajectory": trajectory}, lambda _: None)
                del worker.trajectories[trajectory]

    @property
    def _runs(self) -> bool:
        """Whether the objects are agents."""
        return self._described is not None and self._described["runs"]

    def close(self) -> None:
        """Kill all processes."""
        self._closed.set()
        with self._lock:
            for worker in self._workers:
                if worker is not None:
                    worker.outbox.put(None)
                    worker.process.kill()
                    worker.process.wait()
            self._workers = [None] * len(self._workers)
            if self._directory is not None:
                self._directory.cleanup()

    def _find_worker(self, number: int) -> _Worker:
        """Return a process of the pool. Start it if it does not run."""
        worker = self._workers[number]
        if worker is not None and worker.process.poll() is not None:
            self._lose(number, worker, f"ended its process (status {worker.process.returncode})")
            worker = None
        if worker is None:
            worker = self._workers[number] = self._start(number)
        return worker

    def _ask(
        self, number: int, worker: _Worker, content: dict[str, Any], answer: Callable[[Answer], None]
    ) -> None:
        alone = worker.trajectories.get(content.get("trajectory", -1), False)
        request = _Request({"id": next(self._numbers), **content}, answer, alone)
        if content["do"] in ("end", "close"):
            worker.waiting.appendleft(request)  # it frees an object
        else:
            worker.waiting.append(request)
        self._dispatch(worker)

    def _start(self, number: int) -> _Worker:
        """Start a process. Its first line of input says which code to import."""
        environment = dict(os.environ)
        if OBJECTS_VARIABLE not in environment and (objects := find_objects(self._config.factory)):
            self._directory = self._directory or tempfile.TemporaryDirectory(prefix="realrl-environment-")
            file = Path(self._directory.name, "objects")
            file.write_bytes(pack_objects(objects))
            environment[OBJECTS_VARIABLE] = str(file)
        for name in ("NO_PROXY", "no_proxy"):  # agents reach the model on this machine
            environment[name] = ",".join(filter(None, (environment.get(name), "127.0.0.1")))
        process = subprocess.Popen(
            [sys.executable, "-m", "realrl.environments.process"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        worker = _Worker(process, due=time.monotonic() + _START_SECONDS)
        start = {
            "path": sys.path,
            "reference": self._config.factory,
            "options": self._config.options,
            "threads": self._config.threads or _MOST_THREADS,
            "form": self._form,
            "longest": _CHARACTERS * self._config.max_observation_tokens,
        }
        worker.outbox.put(json.dumps(start))
        for target in (self._read, self._send):
            threading.Thread(
                target=target, args=(number, worker), name="realrl-environments", daemon=True
            ).start()
        return worker

    def _dispatch(self, worker: _Worker) -> None:
        """Send waiting requests while the process has free threads. Their time limit begins now."""
        most = self._config.threads or (_MOST_THREADS if self._runs else CALLS_AT_ONCE)
        while worker.ready and worker.waiting and len(worker.running) < most:
            running = worker.running.values()
            if running and (worker.waiting[0].alone or any(request.alone for request in running)):
                return
            request = worker.waiting.popleft()
            request.due = time.monotonic() + self._config.timeout
            worker.running[request.content["id"]] = request
            worker.outbox.put(json.dumps(request.content))

    def _send(self, number: int, worker: _Worker) -> None:
        """Write the lines of the outbox to a process."""
        assert worker.process.stdin is not None
        # If the process has ended, its reader notices.
        with suppress(OSError):
            while (line := worker.outbox.get()) is not None:
                print(line, file=worker.process.stdin, flush=True)

    def _read(self, number: int, worker: _Worker) -> None:
        """Read the answers of a process until it ends."""
        assert worker.process.stdout is not None
        for line in worker.process.stdout:
            answer = json.loads(line)
            with self._lock:
                if answer["id"] == -1:
                    if "error" in answer:
                        self._lose(number, worker, answer["error"])
                        return
                    worker.ready = True
                    request = None
                else:
                    request = worker.running.pop(answer["id"], None)
                self._dispatch(worker)
            if request is not None:
                failed = "error" in answer
                request.answer(_read_failure(answer) if failed else answer)
        status = worker.process.wait()
        with self._lock:
            self._lose(number, worker, f"ended its process (status {status})")

    def _lose(self, number: int, worker: _Worker, reason: str, late: Collection[_Request] = ()) -> None:
        """Give up a process. All of its requests and trajectories fail.

        `late`: the requests that are to blame; if there are none, any request that runs may be.
        """
        if self._workers[number] is worker:
            self._workers[number] = None
        running, waiting = list(worker.running.values()), list(worker.waiting)
        ready = worker.ready
        worker.running.clear()
        worker.waiting.clear()
        worker.trajectories.clear()
        worker.outbox.put(None)
        worker.process.kill()
        # An agent that waits for the model does nothing.
        active = [request for request in running if request.due < math.inf] or running
        unclear = not late and len(active) > 1
        for request in (*running, *waiting):
            own = not ready or (request in (late or active) and not unclear)
            suspect = unclear and request in active
            request.answer(Failure(reason if own or suspect else _LOST, own=own, suspect=suspect))

    def _watch(self) -> None:
        """Kill processes with a call that exceeds its time limit."""
        while not self._closed.wait(0.05):
            now = time.monotonic()
            with self._lock:
                for number, worker in enumerate(self._workers):
                    if worker is None:
                        continue
                    if not worker.ready and now > worker.due:
                        self._lose(number, worker, f"was not imported within {_START_SECONDS:g} s")
                    elif late := [request for request in worker.running.values() if request.due < now]:
                        limit = self._config.timeout
                        reason = f"did not answer within {limit:g} s (environment.timeout)"
                        self._lose(number, worker, reason, late)


def _read_failure(answer: Mapping[str, Any]) -> Failure:
    return Failure(answer["error"], answer.get("trace", ""), raised="trace" in answer)


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return False
    return True
