"""Settings of the optimizer of a model: AdamW and its learning rate."""

from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, model_validator

from realrl.config.base import Settings

Decay = Annotated[float, Field(ge=0, lt=1, strict=True)]
"""Share of a moving average that stays per step."""


class OptimizerConfig(Settings):
    """AdamW and its learning-rate schedule."""

    lr: float = Field(default=1e-5, gt=0, le=1)
    """Peak learning rate. An update moves every weight by about this much, and weights are well below 1."""
    betas: tuple[Decay, Decay] = Field(default=(0.9, 0.95), strict=False)  # YAML has lists, not tuples
    """Decay of the first and second moment."""
    eps: float = Field(default=1e-8, gt=0, le=1)
    """Added to the denominator of the update."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay, not applied to norms and biases. Each step removes the share `lr * weight_decay` of a
    weight, which must be below 1."""
    grad_clip: PositiveFloat | None = 1.0
    """Global gradient norm is scaled down to this; null for no clipping."""
    warmup_steps: NonNegativeInt = 0
    """Training steps over which the rate rises linearly from 0."""
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    """How the rate falls after warm-up, over the remaining training steps."""
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """The schedule ends at this fraction of `lr`."""

    @model_validator(mode="after")
    def _decays(self) -> Self:
        if self.lr * self.weight_decay >= 1:
            raise ValueError(
                f"lr={self.lr:g} times weight_decay={self.weight_decay:g} must be below 1; each step would take"
                " away all of every weight"
            )
        return self
