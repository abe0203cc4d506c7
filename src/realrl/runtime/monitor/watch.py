"""SignWatch over the signs of life of all ranks: who is frozen, or what nobody gets on with. No torch."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Self

from realrl.program.text import format_ranks
from realrl.recipe.run_settings import LaunchConfig
from realrl.runtime.monitor.sign import BEAT, Sign

GAP = 10.0
"""Seconds between two looks after which whoever watches has itself stood still, as a suspended laptop does."""
_BUSY = 0.5
"""CPU seconds a second above which a process computes."""
_LIVELY = ("train", "eval", "save")
"""Parts of a run in which something should be done all the time."""
_SLOW = 4
"""Times that other parts may take: models come from file systems and networks."""


@dataclass(frozen=True, kw_only=True)
class WatchLimits:
    """Time that may pass before something is taken to be wrong."""

    freeze_seconds: float
    """Without a sign of life of a rank."""
    stall_seconds: float | None
    """Without progress anywhere in a step, and `_SLOW` times as long at the start and the end; None is for ever."""

    @classmethod
    def of(cls, launch: LaunchConfig) -> Self:
        """Take the limits of a recipe."""
        minutes = launch.stall_minutes
        return cls(
            freeze_seconds=launch.freeze_seconds, stall_seconds=None if minutes is None else 60 * minutes
        )


@dataclass(frozen=True)
class Verdict:
    """Judgement of what is wrong with a run, and with which rank it began."""

    rank: int
    message: str
    frozen: bool
    """Whether the rank gives no sign of life."""


@dataclass(frozen=True)
class _Seen:
    """A rank's latest sign of life, and when it came."""

    sign: Sign
    at: float


class SignWatch:
    """Watcher of the signs of ranks, by its own clock alone."""

    def __init__(
        self,
        limits: WatchLimits,
        clock: Callable[[], float] = time.monotonic,
        works: Callable[[Sign], bool] = lambda sign: False,
    ) -> None:
        """`works` checks whether the process of a sign uses a core or waits for one, as far as can be known."""
        self._limits, self._clock, self._works = limits, clock, works
        self._seen: dict[int, _Seen] = {}
        self._looked = clock()
        self._moved = self._looked
        """When there was progress last."""
        self._progress: dict[int, int] = {}
        """Most progress of each rank so far."""
        self._cpu: dict[int, float] = {}
        """CPU seconds of each rank when there was progress last."""

    def look(self, signs: Mapping[int, Sign]) -> Verdict | None:
        """Look at the signs of the ranks that should be alive, every few seconds; tell what is wrong."""
        now = self._clock()
        if now - self._looked > GAP:
            # Nobody was awake. What is left of the limits begins anew.
            late = now - self._looked
            self._seen = {rank: _Seen(seen.sign, seen.at + late) for rank, seen in self._seen.items()}
            self._moved += late
        self._looked = now
        for rank, sign in signs.items():
            seen = self._seen.get(rank)
            if seen is None or seen.sign.beats != sign.beats or seen.sign.pid != sign.pid:
                self._seen[rank] = _Seen(sign, now)
        further = {r: s.progress for r, s in signs.items() if s.progress > self._progress.get(r, -1)}
        if further:
            self._moved = now
            self._progress |= further
            self._cpu = {rank: sign.cpu_seconds for rank, sign in signs.items()}
        return self._find_frozen(signs, now) or self._find_stuck(signs, now)

    def _find_frozen(self, signs: Mapping[int, Sign], now: float) -> Verdict | None:
        """Find the rank whose last sign of life is the oldest, if it is too old and its process does not work.

        One that works waits for a core, or code that does not let others in keeps the interpreter to itself.
        """
        limit = max(self._limits.freeze_seconds, 2 * BEAT)
        for silent, sign in signs.items():
            if now - self._seen[silent].at > limit / 2 and self._works(sign):
                self._seen[silent] = _Seen(sign, now)
        rank = min(signs, key=lambda rank: self._seen[rank].at, default=None)
        if rank is None or now - self._seen[rank].at < limit:
            return None
        seconds = now - self._seen[rank].at
        message = (
            f"rank {rank} is frozen: no sign of life for {seconds:.0f} seconds; last seen {signs[rank].place}"
        )
        return Verdict(rank, message, frozen=True)

    def _find_stuck(self, signs: Mapping[int, Sign], now: float) -> Verdict | None:
        limit, seconds = self._limits.stall_seconds, now - self._moved
        lively = any(sign.doing in _LIVELY for sign in signs.values())
        if limit is None or not signs or seconds < limit * (1 if lively else _SLOW):
            return None
        no_progress = f"no progress on any rank for {_duration(seconds)} (launch.stall_minutes)"
        running = [sign for sign in signs.values() if sign.function is not None]
        if running:
            sign = max(running, key=lambda sign: sign.function_seconds)
            message = (
                f"rank {sign.rank} is stuck in {sign.function}, which has run for"
                f" {sign.function_seconds:.0f} seconds, {sign.place}; {no_progress}"
            )
            return Verdict(sign.rank, message, frozen=False)
        last = min(signs.values(), key=lambda sign: (*sign.key, sign.rank))
        busy = [sign for sign in signs.values() if self._is_busy(sign, seconds)]
        if len({sign.key for sign in signs.values()}) == 1 and busy:
            # All are in one instruction: those that compute keep the others waiting.
            last = min(busy, key=lambda sign: sign.rank)
        others = [sign.rank for sign in signs.values() if sign.key > last.key]
        behind = f" and keeps rank {', '.join(map(str, others))} waiting" if others else ""
        if self._is_busy(last, seconds):
            message = f"rank {last.rank} computes without end {last.place}{behind}; {no_progress}"
        elif others or len(signs) == 1:
            message = f"rank {last.rank} is stuck {last.place}{behind}; {no_progress}"
        else:
            what = "for each other in a collective" if lively else "for each other or a file"
            message = f"all ranks wait {what}, {last.place}; {no_progress}"
        return Verdict(last.rank, message, frozen=False)

    def _is_busy(self, sign: Sign, seconds: float) -> bool:
        return sign.cpu_seconds - self._cpu.get(sign.rank, sign.cpu_seconds) > _BUSY * seconds


def describe_waiting(signs: Mapping[int, Sign], culprit: int) -> list[str]:
    """Describe what the other ranks were at when one had failed, those at the same together."""
    places: dict[str, list[Sign]] = {}
    for rank, sign in signs.items():
        if rank != culprit:
            places.setdefault(sign.place, []).append(sign)
    notes = []
    for place, there in places.items():
        ranks = format_ranks([sign.rank for sign in there])
        seconds = max(sign.waited for sign in there)
        who = f"rank {ranks} was" if len(there) == 1 else f"ranks {ranks} were"
        notes.append(f"{who} {place}, for {seconds:.0f} seconds")
    return notes


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
