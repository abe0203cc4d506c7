"""Rate of failures that end a run, and known times to detect a failure and to restart."""

from dataclasses import dataclass

DAY = 86_400.0
"""Seconds of a day."""


@dataclass(frozen=True, kw_only=True)
class Failures:
    """Failures that end a run, at a constant rate per device, and how the run recovers."""

    per_device_day: float
    """Failures per device and day, including the device's share of failures of nodes and network."""
    restart_seconds: float | None = None
    """Known seconds from a failure until training resumes. None means that they are predicted."""
    notice_seconds: float = 30.0
    """Seconds without a heartbeat until a device counts as failed (`launch.freeze_seconds`)."""
    asynchronous: bool = True
    """Whether checkpoints are written during training (`checkpoint.asynchronous`)."""

    def __post_init__(self) -> None:
        if not self.per_device_day > 0:
            raise ValueError(f"{self.per_device_day} failures of a device in a day are not above 0")

    def per_day(self, devices: int) -> float:
        """Compute the failures per day of a run on `devices` devices. Idle devices fail as often as busy ones."""
        return self.per_device_day * devices
