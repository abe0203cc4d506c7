"""How an environment takes part in the trajectories of a generate call."""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from realrl.program.arrays import Floats

_TRAJECTORIES = 64
"""Number of trajectories that represent all of them."""


@dataclass(frozen=True)
class EnvironmentTimes:
    """What a run has measured of its environment, or what a file states. All are samples of distributions."""

    seconds: tuple[float, ...]
    """Seconds that an object takes to answer, at `reset` and after each turn; or that an agent takes before each
    request, and after the last answer."""
    turns: tuple[int, ...]
    """Turns of the model in a trajectory."""
    given: tuple[int, ...]
    """Tokens that the environment and the chat template add to a trajectory."""
    agents: bool = False
    """Whether the objects are agents, each of which runs during the whole trajectory."""


@dataclass(frozen=True)
class EnvironmentWork:
    """The environment of a generate call."""

    times: EnvironmentTimes
    at_once: float
    """Number of objects of a data-parallel rank that may answer at the same time."""
    rows_at_once: float = math.inf
    """Number of trajectories of a data-parallel rank that may be under way at the same time."""

    @property
    def turns(self) -> float:
        """Mean number of turns of a trajectory."""
        return float(np.mean(self.times.turns))

    @property
    def given(self) -> float:
        """Mean number of tokens that a trajectory is given."""
        return float(np.mean(self.times.given))

    @property
    def seconds(self) -> float:
        """Mean seconds of an answer."""
        return float(np.mean(self.times.seconds))

    @property
    def deviation(self) -> float:
        """Standard deviation of the seconds of an answer."""
        return float(np.std(self.times.seconds))

    @cached_property
    def waits(self) -> Floats:
        """Seconds that trajectories wait in all, from the one with fewest turns to the one with most. [N]"""
        draw = np.random.default_rng(0)
        turns = np.sort(np.resize(self.times.turns, max(_TRAJECTORIES, len(self.times.turns))))
        # An object answers at `reset`, too.
        return np.array([draw.choice(self.times.seconds, count + 1).sum() for count in turns])
