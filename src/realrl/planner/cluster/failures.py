"""Rate of failures that end a run, and what a restart is known to take."""

from dataclasses import dataclass

DAY = 86_400.0
"""Seconds of a day."""
LLAMA_3 = 419 / 54 / 16.384
"""Failures a day of 1,000 devices in the training of Llama 3 405B: 419 unexpected interruptions in 54 days on
16,384 H100 (arXiv 2407.21783, section 3.3.4)."""


@dataclass(frozen=True, kw_only=True)
class Failures:
    """Failures that end a run, at a constant rate for each device, and how the run meets them."""

    per_device_day: float
    """Failures of one device in a day, with its share of those of nodes and network."""
    restart_seconds: float | None = None
    """Seconds from a failure until training goes on, as they are known; None to predict them."""
    notice_seconds: float = 30.0
    """Seconds until a device that says nothing any more is missed (`launch.freeze_seconds`)."""
    asynchronous: bool = True
    """Whether checkpoints are written while training goes on (`checkpoint.asynchronous`)."""

    def __post_init__(self) -> None:
        if not self.per_device_day > 0:
            raise ValueError(f"{self.per_device_day} failures of a device in a day are not above 0")

    def per_day(self, devices: int) -> float:
        """Compute the failures in a day of a run on so many devices: of any of them, busy or idle."""
        return self.per_device_day * devices
