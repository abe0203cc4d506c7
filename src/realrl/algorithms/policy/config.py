"""Settings of policy learning. No torch."""

from typing import Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from realrl.config.base import Settings
from realrl.config.explain import brief

KLEstimator = Literal["k1", "k2", "k3"]
"""Estimator of a KL divergence from samples (Schulman 2020, "Approximating KL divergence")."""


class ReferenceConfig(Settings):
    """Settings of algorithms whose reference may follow the actor."""

    ref_ema: float | None = Field(default=None, gt=0, le=1)
    """After each step, move the reference this fraction of the way to the actor; null keeps it frozen, unless
    `ref_every` is given."""
    ref_every: PositiveInt | None = None
    """Move the reference only after every so many steps: as far as `ref_ema` says or, where that is null, all the
    way, so that the actor as it is then becomes the reference. Null for every step."""

    @property
    def following(self) -> str | None:
        """Setting by which the reference follows the actor, with its value; None where it is frozen."""
        if self.ref_ema is not None:
            return f"ref_ema={self.ref_ema:g}"
        return None if self.ref_every is None else f"ref_every={self.ref_every}"


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

    @model_validator(mode="after")
    def _steers_something(self) -> Self:
        for name in ("adaptive", "target", "horizon"):
            value = getattr(self, name)
            if self.coef == 0 and value != type(self).model_fields[name].default:
                shown = brief(value) if isinstance(value, bool) else f"{value:g}"
                raise ValueError(
                    f"{name}={shown} is for a coefficient that adapts, and coef=0 stays 0 whatever it is"
                    f" multiplied by; set coef above 0, or leave {name} out"
                )
        return self
