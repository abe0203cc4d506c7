"""Settings of policy learning. No torch."""

from typing import Literal

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from realrl.config.base import Settings

KLEstimator = Literal["k1", "k2", "k3"]
"""Estimator of a KL divergence from samples (Schulman 2020, "Approximating KL divergence")."""


class KLConfig(Settings):
    """Penalty that keeps the actor near the reference."""

    coef: NonNegativeFloat = 0.1
    """Weight of the per-token penalty log p_actor - log p_ref; the initial one if adaptive."""
    adaptive: bool = False
    """Steer `coef` so that the KL per sequence approaches `target` (Ziegler et al. 2019, section 2.2)."""
    target: PositiveFloat = 6.0
    """Wanted KL per sequence, in nats. Where sampling leaves tokens out (top_k, top_p, min_new_tokens), KL here and
    in the metrics is the generalised KL over those that may be drawn, which is never negative."""
    horizon: PositiveInt = 1000
    """Sequences, over all devices, within which the adaptive coefficient changes by about 20 % at most: with 128
    of them in a step it takes at least 27 steps to double."""
