"""A watchdog over the heartbeats of all ranks finds frozen ranks and stalled steps. Does not import torch.

realrl's launcher runs a watchdog in its loop. Under torchrun, every rank runs a watchdog in a thread (`PeerWatch`).
"""

import faulthandler
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from realrl.program.text import format_ranks
from realrl.recipe.run_settings import LaunchConfig
from realrl.runtime.supervision.board import StoreBoard, is_alive
from realrl.runtime.supervision.failures import RUN_STATUS, Failure
from realrl.runtime.supervision.heartbeat import INTERVAL, Heartbeat

GAP = 10.0
"""If more seconds than this pass between two checks, the watchdog itself was not running, as on a suspended
laptop."""
_BUSY = 0.5
"""A process counts as busy if it uses more than this many CPU seconds per second."""
_LIVELY = ("train", "eval", "save")
"""Parts of a run that should always make progress."""
_SLOW = 4
"""Factor on the time limit in all other parts of a run, because loading models over a network is slow."""


class Watchdog:
    """Judges the heartbeats of all ranks. It measures their age by its own clock only."""

    def __init__(
        self,
        limits: LaunchConfig,
        works: Callable[[Heartbeat], bool] = lambda heartbeat: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """For `works`, see `Board.works`."""
        self._freeze_seconds = max(limits.freeze_seconds, 2 * INTERVAL)
        self._stall_seconds = None if limits.stall_minutes is None else 60 * limits.stall_minutes
        self._works, self._clock = works, clock
        self._seen: dict[int, tuple[tuple[int, int], float]] = {}
        """For each rank: process and number of its last heartbeat, and when this heartbeat arrived."""
        self._checked = self._progressed = clock()
        self._progress: dict[int, int] = {}
        """Progress of each rank so far."""
        self._cpu: dict[int, float] = {}
        """CPU seconds of each rank at the last progress of any rank."""

    def check(self, heartbeats: Mapping[int, Heartbeat]) -> Failure | None:
        """Check the ranks that should be alive. Called every few seconds. Returns a failure, if there is one."""
        now = self._clock()
        late = now - self._checked
        if late > GAP:
            # This process, and probably the ranks, did not run in the meantime, so the time does not count.
            self._seen = {rank: (beat, at + late) for rank, (beat, at) in self._seen.items()}
            self._progressed += late
        self._checked = now
        for rank, heartbeat in heartbeats.items():
            beat = heartbeat.pid, heartbeat.beats
            if self._seen.get(rank, (None, 0.0))[0] != beat:
                self._seen[rank] = beat, now
        further = {r: h.progress for r, h in heartbeats.items() if h.progress > self._progress.get(r, -1)}
        if further:
            self._progressed = now
            self._progress |= further
            self._cpu = {rank: heartbeat.cpu_seconds for rank, heartbeat in heartbeats.items()}
        return self._find_frozen(heartbeats, now) or self._find_stalled(heartbeats, now)

    def _find_frozen(self, heartbeats: Mapping[int, Heartbeat], now: float) -> Failure | None:
        """Find the rank with the oldest heartbeat, if this heartbeat is too old and the process does not work.

        A process may work without heartbeats if it waits for a core, or if its code keeps the interpreter's lock.
        """
        limit = self._freeze_seconds
        for rank, heartbeat in heartbeats.items():
            beat, at = self._seen[rank]
            if now - at > limit / 2 and self._works(heartbeat):
                self._seen[rank] = beat, now
        rank = min(heartbeats, key=lambda rank: self._seen[rank][1], default=-1)
        if rank < 0 or now - self._seen[rank][1] < limit:
            return None
        seconds = now - self._seen[rank][1]
        place = heartbeats[rank].place
        message = f"rank {rank} is frozen: no sign of life for {seconds:.0f} seconds; last seen {place}"
        return _make_failure(rank, message, device=True)

    def _find_stalled(self, heartbeats: Mapping[int, Heartbeat], now: float) -> Failure | None:
        """Find the rank that keeps all others waiting, if no rank has made progress for too long."""
        limit, seconds = self._stall_seconds, now - self._progressed
        lively = any(heartbeat.doing in _LIVELY for heartbeat in heartbeats.values())
        if limit is None or not heartbeats or seconds < limit * (1 if lively else _SLOW):
            return None
        long = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
        no_progress = f"no progress on any rank for {long} (launch.stall_minutes)"
        running = [heartbeat for heartbeat in heartbeats.values() if heartbeat.function is not None]
        if running:
            last = max(running, key=lambda heartbeat: heartbeat.function_seconds)
            message = (
                f"rank {last.rank} is stuck in {last.function}, which has run for"
                f" {last.function_seconds:.0f} seconds, {last.place}; {no_progress}"
            )
            return _make_failure(last.rank, message)
        last = min(heartbeats.values(), key=lambda heartbeat: (*heartbeat.key, heartbeat.rank))
        busy = [heartbeat for heartbeat in heartbeats.values() if self._is_busy(heartbeat, seconds)]
        if len({heartbeat.key for heartbeat in heartbeats.values()}) == 1 and busy:
            # All ranks are in the same instruction, so the ranks that compute keep the others waiting.
            last = min(busy, key=lambda heartbeat: heartbeat.rank)
        others = [heartbeat.rank for heartbeat in heartbeats.values() if heartbeat.key > last.key]
        behind = f" and keeps rank {', '.join(map(str, others))} waiting" if others else ""
        if last in busy:
            message = f"rank {last.rank} computes without end {last.place}{behind}; {no_progress}"
        elif others or len(heartbeats) == 1:
            message = f"rank {last.rank} is stuck {last.place}{behind}; {no_progress}"
        else:
            what = "for each other in a collective" if lively else "for each other or a file"
            message = f"all ranks wait {what}, {last.place}; {no_progress}"
        return _make_failure(last.rank, message)

    def _is_busy(self, heartbeat: Heartbeat, seconds: float) -> bool:
        used = heartbeat.cpu_seconds - self._cpu.get(heartbeat.rank, heartbeat.cpu_seconds)
        return used > _BUSY * seconds


def _make_failure(rank: int, message: str, *, device: bool = False) -> Failure:
    return Failure(message, RUN_STATUS, rank, time.time(), device=device)


def describe_others(heartbeats: Mapping[int, Heartbeat], culprit: int) -> list[str]:
    """Describe what the other ranks were doing when one failed. Each text names a place and all ranks there."""
    places: dict[str, list[Heartbeat]] = {}
    for rank, heartbeat in heartbeats.items():
        if rank != culprit:
            places.setdefault(heartbeat.place, []).append(heartbeat)
    texts = []
    for place, there in places.items():
        ranks = format_ranks([heartbeat.rank for heartbeat in there])
        who = f"rank {ranks} was" if len(there) == 1 else f"ranks {ranks} were"
        texts.append(f"{who} {place}, for {max(heartbeat.waited for heartbeat in there):.0f} seconds")
    return texts


class PeerWatch:
    """A thread of a rank that watches other ranks, and ends this process when the run has failed.

    Rank 0 watches all ranks. Every other rank watches rank 0 and the ranks of its own machine. Each rank is
    therefore watched by another one, and no rank reads more than necessary.
    """

    def __init__(
        self, board: StoreBoard, limits: LaunchConfig, rank: int, end: Callable[[str, bool], None]
    ) -> None:
        """`end` is called with the message, and with whether this rank has found the failure.

        `end` must not return.
        """
        self._board, self._limits, self._rank, self._end = board, limits, rank, end
        self._stop = threading.Event()

    def start(self) -> None:
        """Start watching. All ranks must have published a heartbeat."""
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def stop(self) -> None:
        """Stop watching."""
        self._stop.set()

    def _watch(self) -> None:
        heartbeats = self._board.read_heartbeats()
        own = heartbeats[self._rank].machine if self._rank in heartbeats else None
        siblings = [rank for rank, heartbeat in heartbeats.items() if heartbeat.machine == own]
        watched = [*heartbeats] if self._rank == 0 else sorted({0, *siblings})
        # Only rank 0 sees all ranks, so only rank 0 can find out that none of them makes progress.
        limits = self._limits if self._rank == 0 else self._limits.model_copy(update={"stall_minutes": None})
        watchdog = Watchdog(limits, self._board.works)
        while not self._stop.wait(INTERVAL):
            heartbeats = self._board.read_heartbeats(watched)
            running = {rank: heartbeat for rank, heartbeat in heartbeats.items() if not heartbeat.ended}
            found = _find_dead(running, siblings) or watchdog.check(running)
            silent = self._board.silent_seconds
            if silent > self._limits.freeze_seconds and not self._stop.is_set():
                self._end(f"rank 0 or its machine has not answered for {silent:.0f} seconds", True)
            first = found is not None and self._board.report(found)
            for failure in self._board.read_failures():
                if not self._stop.is_set():
                    self._end_run(failure, heartbeats, siblings, first)

    def _end_run(
        self, failure: Failure, heartbeats: Mapping[int, Heartbeat], siblings: list[int], first: bool
    ) -> None:
        """End this process because the run has failed.

        Also kill the rank that caused the failure if it is on this machine.
        """
        culprit = heartbeats.get(failure.rank)
        if culprit is not None and failure.rank in siblings and culprit.pid != os.getpid():
            # That rank may hold the interpreter's lock, or be stopped, and torchrun would wait for it.
            with suppress(ProcessLookupError):
                os.kill(culprit.pid, signal.SIGUSR1)
                time.sleep(0.2)
                os.kill(culprit.pid, signal.SIGKILL)
        with suppress(OSError, ValueError):
            faulthandler.dump_traceback(file=2, all_threads=True)
        notes = [f"\nnote: {text}" for text in describe_others(heartbeats, failure.rank)] if first else []
        self._end(failure.message + "".join(notes), first)


def _find_dead(heartbeats: Mapping[int, Heartbeat], siblings: list[int]) -> Failure | None:
    for rank in siblings:
        heartbeat = heartbeats.get(rank)
        if heartbeat is not None and not is_alive(heartbeat.pid):
            return _make_failure(rank, f"the process of rank {rank} died {heartbeat.place}")
    return None
