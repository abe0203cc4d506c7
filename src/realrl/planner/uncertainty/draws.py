"""Samples of errors, reproducible and the same for whatever shares an error."""

from hashlib import sha256

import numpy as np

from realrl.planner.simulate.simulator import Samples

SAMPLES = 1000
"""Samples of a step; their 5 % and 95 % quantiles then scatter by about a fifteenth of a standard deviation."""


class Draws:
    """Samples of independent errors, each of which belongs to something and is found again by its name."""

    def __init__(self, seed: int = 0, count: int = SAMPLES) -> None:
        self.seed = seed
        self.count = count
        self._known: dict[tuple[object, ...], Samples] = {}

    def sample_factor(self, spread: float, *about: object) -> Samples:
        """Sample measured over predicted seconds: log-normal, of median 1.

        `spread`: standard deviation of its logarithm. `about`: what has this error; equal names have equal samples,
        whatever else was sampled before.
        """
        if about not in self._known:
            digest = sha256(repr((self.seed, *about)).encode()).digest()
            generator = np.random.default_rng(int.from_bytes(digest[:8]))
            self._known[about] = generator.standard_normal(self.count)
        return np.exp(spread * self._known[about])
