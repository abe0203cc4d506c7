"""Board and verdicts of ranks on several machines, in the store by which they have met."""

import faulthandler
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta

import torch.distributed as dist

from realrl.runtime.monitor.sign import BEAT, Sign
from realrl.runtime.monitor.watch import SignWatch, Verdict, WatchLimits, describe_waiting
from realrl.runtime.monitor.work_probe import WorkProbe, is_alive

_VERDICT = "verdict"
_ENDED = "ended"
PATIENCE = 3.0
"""Seconds that a rank that has lost a peer gives others to say why."""


class StoreBoard:
    """Board of ranks that torchrun has started.

    A thread of its own looks at it: on rank 0 at all ranks, elsewhere at rank 0 and the ranks of the same machine.
    So no rank reads more than it must, and each is seen by another one.
    """

    def __init__(self, rank: int, world: int, token: str, timeout: float) -> None:
        """Connect to the store whose address torchrun has given.

        `token`, equal on all ranks, tells this start of the run from others; a store that has not answered for
        `timeout` seconds is `silent`.
        """
        store = dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout),
        )
        self._store = dist.PrefixStore(f"realrl/{token}", store)
        self._silent_since: float | None = None
        # A client of a store must not be used by two threads at a time.
        self._lock = threading.Lock()
        self._rank, self._world = rank, world

    def post(self, sign: Sign) -> None:
        """Leave a sign; called by the thread that beats."""
        with self._using():
            self._store.set(f"sign-{self._rank}", sign.to_json())

    def note(self, sign: Sign) -> None:
        """Leave nothing at the beginning of an instruction: a message would take too long."""

    def read(self) -> dict[int, Sign]:
        """Read the signs of all ranks that have left one, by rank."""
        return self.read_some(range(self._world))

    def read_some(self, ranks: range | list[int]) -> dict[int, Sign]:
        """Read the signs of some ranks."""
        found = {}
        for rank in ranks:
            with self._using(), suppress(ValueError):
                name = f"sign-{rank}"
                if self._store.check([name]):
                    found[rank] = Sign.from_json(self._store.get(name))
        return found

    def convict(self, verdict: Verdict) -> bool:
        """Leave a verdict for all ranks; False where another rank has been first."""
        text = json.dumps([verdict.rank, verdict.message, self._rank])
        with self._using():
            return bool(self._store.compare_set(_VERDICT, "", text).decode() == text)
        return False

    def read_verdict(self) -> Verdict | None:
        """Read the verdict, if there is one."""
        with self._using():
            if self._store.check([_VERDICT]):
                rank, message, _ = json.loads(self._store.get(_VERDICT))
                return Verdict(rank, message, frozen=False)
        return None

    def say_ended(self) -> None:
        """Tell the others that this rank ends well, so that nobody misses it."""
        with self._using():
            self._store.set(f"{_ENDED}-{self._rank}", "1")

    def has_ended(self, rank: int) -> bool:
        """Check whether a rank has ended well."""
        with self._using():
            return bool(self._store.check([f"{_ENDED}-{rank}"]))
        return False

    @property
    def silent_seconds(self) -> float:
        """Seconds for which the store has not answered."""
        since = self._silent_since
        return 0.0 if since is None else time.monotonic() - since

    @contextmanager
    def _using(self) -> Iterator[None]:
        """Use the store alone, and note whether it answers."""
        with self._lock:
            asked = time.monotonic()
            try:
                yield
            except RuntimeError:
                self._silent_since = self._silent_since or asked
            else:
                self._silent_since = None


class RankWatch:
    """Thread of a rank that watches other ranks, and ends this process once the run has failed."""

    def __init__(
        self, board: StoreBoard, limits: WatchLimits, rank: int, end: Callable[[str, bool], None]
    ) -> None:
        """`end` is called with what is wrong, and whether this rank found it; it must not return."""
        self._board, self._limits, self._rank, self._end = board, limits, rank, end
        self._stop = threading.Event()

    def start(self) -> None:
        """SignWatch from now on. All ranks must have left a first sign."""
        threading.Thread(target=self._work, name="watch", daemon=True).start()

    def stop(self) -> None:
        """SignWatch no longer, and let others know that this rank ends well."""
        self._stop.set()
        self._board.say_ended()

    def _work(self) -> None:
        signs = self._board.read()
        me = signs.get(self._rank)
        siblings = [rank for rank, sign in signs.items() if me is not None and sign.machine == me.machine]
        watched = [*signs] if self._rank == 0 else sorted({0, *siblings})
        # One rank alone judges whether nothing gets on: it sees all.
        limits = self._limits if self._rank == 0 else replace(self._limits, stall_seconds=None)
        probe = WorkProbe()
        watch = SignWatch(limits, works=lambda sign: sign.rank in siblings and probe.works(sign))
        while not self._stop.wait(BEAT):
            signs = self._board.read_some(watched)
            verdict = self._find_dead(signs, siblings) or watch.look(
                {rank: sign for rank, sign in signs.items() if not self._board.has_ended(rank)}
            )
            if self._board.silent_seconds > self._limits.freeze_seconds and not self._stop.is_set():
                seconds = self._board.silent_seconds
                self._end(f"rank 0 or its machine has not answered for {seconds:.0f} seconds", True)
            if verdict is not None:
                notes = "".join(f"\nnote: {text}" for text in describe_waiting(signs, verdict.rank))
                mine = self._board.convict(verdict)
            else:
                notes, mine = "", False
            known = self._board.read_verdict()
            if known is not None and not self._stop.is_set():
                self._execute(known, signs, notes if mine else "", mine)

    def _find_dead(self, signs: dict[int, Sign], siblings: list[int]) -> Verdict | None:
        for rank in siblings:
            sign = signs.get(rank)
            if sign is not None and not is_alive(sign.pid) and not self._board.has_ended(rank):
                return Verdict(rank, f"the process of rank {rank} died {sign.place}", frozen=False)
        return None

    def _execute(self, verdict: Verdict, signs: dict[int, Sign], notes: str, mine: bool) -> None:
        culprit, me = signs.get(verdict.rank), signs.get(self._rank)
        if culprit is not None and me is not None and culprit.machine == me.machine and culprit.pid != me.pid:
            # It may hold the interpreter, or stand still, and would keep its agent waiting.
            with suppress(ProcessLookupError):
                os.kill(culprit.pid, signal.SIGUSR1)
                time.sleep(0.2)
                os.kill(culprit.pid, signal.SIGKILL)
        with suppress(OSError, ValueError):
            faulthandler.dump_traceback(file=2, all_threads=True)
        self._end(verdict.message + notes, mine)
