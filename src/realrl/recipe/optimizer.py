"""Settings of the optimizer of a model: AdamW and its learning rate."""

from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, model_validator

from realrl.config.base import Settings

Decay = Annotated[float, Field(ge=0, lt=1, strict=True)]
"""Decay factor of a moving average: the share of the old average that each step keeps."""


class OptimizerConfig(Settings):
    """AdamW and its learning-rate schedule."""

    lr: float = Field(default=1e-5, gt=0, le=1)
    """Peak learning rate. An update moves every weight by about this much, and weights are well below 1."""
    betas: tuple[Decay, Decay] = Field(default=(0.9, 0.95), strict=False)  # YAML has lists, not tuples
    """Decay factors of the first and the second moment."""
    eps: float = Field(default=1e-8, gt=0, le=1)
    """Number that is added to the denominator of the update."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay, not applied to norms and biases. Each step shrinks a weight by the share `lr *
    weight_decay`, which must be below 1."""
    grad_clip: PositiveFloat | None = 1.0
    """Maximum global norm of the gradient; a larger gradient is scaled down to it. null for no clipping."""
    warmup_steps: NonNegativeInt = 0
    """Number of training steps over which the learning rate rises linearly from 0."""
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    """How the learning rate falls after warm-up, over the remaining training steps."""
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """Fraction of `lr` at which the schedule ends."""

    @model_validator(mode="after")
    def _decays(self) -> Self:
        if self.lr * self.weight_decay >= 1:
            raise ValueError(
                f"lr={self.lr:g} times weight_decay={self.weight_decay:g} must be below 1; each step would take"
                " away all of every weight"
            )
        return self
