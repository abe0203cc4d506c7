"""A session on several devices of this machine: this process makes the calls, one process per device runs them."""

import json
import pickle
import secrets
import sys
import time
import weakref
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any

from realrl.config.errors import UserError
from realrl.config.files import write_whole
from realrl.plan.cluster import Cluster
from realrl.runtime.launcher.launch import Start
from realrl.runtime.launcher.local import LocalRanks
from realrl.runtime.prepare.inputs import load_shared_tokenizer, load_stop_token_ids
from realrl.runtime.session.recipe import SessionModels
from realrl.runtime.supervision.failures import (
    USER_STATUS,
    Failure,
    describe_death,
    describe_failure,
    find_first_cause,
    make_error,
)

_ADDRESS = "session"
"""File in the scratch directory with the port of the session's process, and its secret key."""
_MOMENT = 5.0
"""Seconds that other ranks get to answer after one has failed."""
_POLL = 0.2
"""Seconds between two looks at the processes while they work."""


@dataclass(frozen=True)
class _Answer:
    """What a rank answers to a call: a result, or a failure."""

    result: Any = None
    failure: Failure | None = None


class RemoteRanks:
    """The ranks of a session in processes of their own. It has the calls of `SessionRank`.

    Functions and data are sent by cloudpickle through a socket of this machine. Both ends prove that they know a
    secret key, which is in a directory that only this user can enter.
    """

    def __init__(self, models: SessionModels, cluster: Cluster) -> None:
        """Start the processes, which load the models. Raises UserError or RunError if one of them fails."""
        self.experiment = models.make_recipe()
        self.tokenizer = load_shared_tokenizer(self.experiment)
        self.stop_token_ids = load_stop_token_ids(self.experiment, self.tokenizer)
        self._ranks = ranks = LocalRanks(Start(cluster, ["session-rank"]), range(cluster.size), 0)
        self.close = weakref.finalize(self, _end, ranks)
        key = secrets.token_bytes(32)
        self._connections: list[Connection] = []
        self._cause = ""
        try:
            with Listener(("127.0.0.1", 0), "AF_INET", backlog=cluster.size, authkey=key) as listener:
                write_whole(ranks.path / _ADDRESS, json.dumps([listener.address[1], key.hex()]))
                self._connections = self._accept(listener, cluster.size)
            self._call(pickle.dumps((sys.path, models)))
        except BaseException:
            self.close()
            raise

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)

        def call(*arguments: Any, **named: Any) -> Any:
            import cloudpickle

            if not self.close.alive:
                raise UserError(
                    "the session is closed" + (f"; it ended after: {self._cause}" if self._cause else "")
                )
            try:
                message = cloudpickle.dumps((name, arguments, named))
            except Exception as error:  # reducing an object runs its own code
                raise UserError(
                    f"{name}: the loss cannot be sent to other processes: {type(error).__name__}: {error}"
                ) from None
            return self._call(message)

        return call

    def _accept(self, listener: Listener, count: int) -> list[Connection]:
        """Accept the connections of all ranks, in the order of ranks. Raises RunError if a rank ends before."""
        found: dict[int, Connection] = {}
        listener._listener._socket.settimeout(_POLL)  # type: ignore[attr-defined]
        while len(found) < count:
            try:
                connection = listener.accept()
            except TimeoutError:
                self._check_alive()
                continue
            found[connection.recv()] = connection
        return [found[rank] for rank in range(count)]

    def _call(self, message: bytes) -> Any:
        """Send a message to all ranks. Returns the result of the first rank, or raises the cause of a failure.

        If every rank reports the same mistake of the user, the session continues. After any other failure it ends.
        """
        answers: dict[int, _Answer] = {}
        failed: float | None = None
        try:
            for connection in self._connections:
                connection.send_bytes(message)
            while len(answers) < len(self._connections):
                waiting = [c for rank, c in enumerate(self._connections) if rank not in answers]
                for ready in wait(waiting, _POLL):
                    rank = self._connections.index(ready)  # type: ignore[arg-type]
                    answers[rank] = self._receive(rank)
                failures = [of.failure for of in answers.values() if of.failure is not None]
                if failures and failed is None:
                    failed = time.monotonic()
                if failed is not None and time.monotonic() - failed > _MOMENT:
                    break
        except BaseException:
            self.close()
            raise
        failures = [of.failure for of in answers.values() if of.failure is not None]
        if not failures:
            return answers[0].result
        cause = find_first_cause(failures)
        if len(failures) < len(self._connections) or any(of.status != USER_STATUS for of in failures):
            self._cause = cause.message
            self.close()
        raise make_error(cause)

    def _receive(self, rank: int) -> _Answer:
        """Receive the answer of a rank, or the failure that ended it."""
        try:
            answer: _Answer = pickle.loads(self._connections[rank].recv_bytes())
            return answer
        except (EOFError, OSError):
            deadline = time.monotonic() + _MOMENT
            while (status := self._ranks.poll()[rank]) is None and time.monotonic() < deadline:
                time.sleep(_POLL)
            reported = {failure.rank: failure for failure in self._ranks.read_failures()}
            died = describe_death(rank, status or 1, time.time(), None)
            return _Answer(failure=reported.get(rank, died))

    def _check_alive(self) -> None:
        """Raise the failure of a rank that has ended."""
        reported = [*self._ranks.read_failures()]
        for rank, status in enumerate(self._ranks.poll()):
            if status is not None:
                raise make_error(
                    find_first_cause(reported or [describe_death(rank, status, time.time(), None)])
                )


def _end(ranks: LocalRanks) -> None:
    """End the processes. They have nothing to save, so they need not be asked."""
    ranks.kill()
    ranks.close()


def serve(scratch: Path, rank: int) -> None:
    """Serve as a rank of a session until the session's process closes the connection."""
    from realrl.runtime.session.rank import SessionRank

    port, key = _wait_for_address(scratch / _ADDRESS)
    with Client(("127.0.0.1", port), "AF_INET", authkey=key) as connection:
        connection.send(rank)
        # Unpickling is safe: both ends are processes of one user, and share a secret key.
        path, models = pickle.loads(connection.recv_bytes())
        sys.path += [entry for entry in path if entry not in sys.path]
        served: SessionRank | None = None
        while True:
            try:
                if served is None:
                    served, result = SessionRank(models), None
                else:
                    name, arguments, named = pickle.loads(connection.recv_bytes())
                    result = getattr(served, name)(*arguments, **named)
                answer = _Answer(result if rank == 0 else None)
            except EOFError:
                return
            except Exception as error:
                answer = _Answer(failure=describe_failure(error))
            connection.send_bytes(pickle.dumps(answer))
            if served is None:
                return


def _wait_for_address(file: Path) -> tuple[int, bytes]:
    """Read the port and the secret key, which the session's process writes when it listens."""
    while not file.exists():
        time.sleep(_POLL / 4)
    port, key = json.loads(file.read_text())
    return port, bytes.fromhex(key)
