"""Forwarding of a request to end from a launcher to its ranks, which then save and end. No torch."""

import signal
from collections.abc import Callable

from realrl.runtime.processes.signals import stop_requested


class Termination:
    """Sender of SIGTERM, once, and of SIGKILL to ranks that have not ended in time."""

    def __init__(self, grace_seconds: float, send: Callable[[signal.Signals], None]) -> None:
        """`send` signals all ranks; they have `grace_seconds` between the two signals."""
        self._grace, self._send = grace_seconds, send
        self._asked: float | None = None

    @property
    def asked(self) -> bool:
        """True once SIGTERM has been sent to the ranks."""
        return self._asked is not None

    def forward(self, now: float) -> None:
        """Forward what is due at a time of the monotonic clock."""
        if not stop_requested():
            return
        if self._asked is None:
            self._asked = now
            self._send(signal.SIGTERM)
        elif now - self._asked > self._grace:
            self._send(signal.SIGKILL)
