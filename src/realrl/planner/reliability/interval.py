"""Expected time of a step where failures end a run and checkpoints let it go on.

Failures come at a constant rate, also during restarts. Of synchronous checkpoints the formula is that of J. T. Daly
("A higher order estimate of the optimum checkpoint interval for restart dumps", Future Generation Computer Systems
22, 2006, equation 20), whose best interval is J. W. Young's (Communications of the ACM 17, 1974), the square root
of 2 x stop / rate, where failures are rare.
"""

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class Interruptions:
    """Rate of failures, and what checkpoints and restarts take, in seconds."""

    rate: float
    """Failures per second."""
    stop: float
    """Seconds that training waits for a checkpoint."""
    write: float
    """Seconds until it is complete, those included: an earlier failure goes back to the one before."""
    restart: float
    """Seconds from a failure until training goes on."""

    def __post_init__(self) -> None:
        if self.rate <= 0 or not 0 <= self.stop <= self.write or self.restart < 0:
            raise ValueError(f"{self} is not possible")


def expected_step(of: Interruptions, step: float, every: int) -> float:
    """Compute the expected seconds per step, lost ones included, with a checkpoint after every `every` steps.

    A run that has just completed a checkpoint needs `every` steps and a stop, M seconds, without a failure for the
    next one; after a failure it restarts from there and needs `every` steps and the whole writing. The expected
    time between two checkpoints is therefore exp(rate (restart + write - stop)) (exp(rate M) - 1) / rate: what is
    written while training goes on counts as a part of the restart. Infinite where failures come too fast.
    """
    between = of.rate * (every * step + of.stop)
    before = of.rate * (of.restart + of.write - of.stop)
    if before + between > 700:  # beyond what a float holds
        return math.inf
    return math.exp(before) * math.expm1(between) / (of.rate * every)


def best_interval(of: Interruptions, step: float) -> int:
    """Find the number of steps between checkpoints that makes the expected step shortest.

    A checkpoint begins after the one before is complete.
    """
    least = max(1, math.ceil((of.write - of.stop) / step - 1e-9))
    # Restart and writing scale all intervals alike; without them, the expected step is convex in the interval.
    alone = replace(of, restart=0.0, write=of.stop)

    def grows(every: int) -> bool:
        return expected_step(alone, step, every + 1) >= expected_step(alone, step, every)

    low, high = least, 2 * least
    if grows(low):
        return low
    while not grows(high):
        low, high = high, 2 * high
    while high - low > 1:  # grows at high, not yet at low
        middle = (low + high) // 2
        if grows(middle):
            high = middle
        else:
            low = middle
    return high
