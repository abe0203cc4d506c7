"""Outlook of a plan: an interval of its step, and the probability that it is the fastest."""

from dataclasses import dataclass

LEVEL = 0.9
"""Probability with which a measured time lies in its interval."""

CONVINCING = 0.8
"""A plan counts as faster than another if the probability of this is at least `CONVINCING`."""


@dataclass(frozen=True)
class Interval:
    """Seconds between which a time lies with probability `LEVEL`. It lies below as often as above."""

    low: float
    high: float

    def __contains__(self, seconds: float) -> bool:
        return self.low <= seconds <= self.high


@dataclass(frozen=True)
class Outlook:
    """Expected step of a plan in comparison with other plans."""

    interval: Interval
    """Seconds of one isolated step."""
    repeated: Interval
    """Seconds per step in steady state."""
    fastest: float
    """Probability that no other plan of the comparison has a shorter step."""
