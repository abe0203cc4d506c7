"""What a user says about each model of a run."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, field_validator, model_validator

from realrl.config.base import Settings
from realrl.config.shape import Head, ModelShape
from realrl.config.shape_source import find_shape

Decay = Annotated[float, Field(ge=0, lt=1, strict=True)]
"""How much of a moving average stays per step."""


class OptimizerConfig(Settings):
    """AdamW and its learning-rate schedule."""

    lr: PositiveFloat = 1e-5
    """Peak learning rate."""
    betas: tuple[Decay, Decay] = Field(default=(0.9, 0.95), strict=False)  # YAML has lists, not tuples
    """Decay of the first and second moment."""
    eps: PositiveFloat = 1e-8
    """Added to the denominator of the update."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay; not applied to one-dimensional tensors."""
    grad_clip: PositiveFloat | None = 1.0
    """Global gradient norm is scaled down to this; null for no clipping."""
    warmup_steps: NonNegativeInt = 0
    """Training steps over which the rate rises linearly from 0."""
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    """How the rate falls after warm-up, over the remaining training steps."""
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """The schedule ends at this fraction of `lr`."""


class ModelConfig(Settings):
    """Where a role's weights come from."""

    path: str | None = None
    """A Hugging Face directory or hub name to load weights, shape and tokenizer from."""
    shape: ModelShape | None = None
    """Sizes of a model to initialise from scratch, when there is no `path`: each of them, the name of a published
    model, for example `llama-2-7b`, or a Hugging Face `config.json` or a directory that holds one."""
    tokenizer: str | None = None
    """Tokenizer directory or hub name; taken from `path` when not given."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights in computation. Trained bfloat16 models keep float32 master weights."""

    @property
    def has_source(self) -> bool:
        """Whether it says where the weights come from."""
        return self.path is not None or self.shape is not None

    @field_validator("shape", mode="before")
    @classmethod
    def _named(cls, value: Any) -> Any:
        return find_shape(value) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.path is not None and self.shape is not None:
            raise ValueError("give either path (load weights) or shape (start from scratch), not both")
        return self


class TrainedModelConfig(ModelConfig):
    """A role whose parameters the run updates."""

    optimizer: OptimizerConfig = OptimizerConfig()


HEADS: dict[str, Head] = {"actor": "lm", "ref": "lm", "critic": "scalar", "reward": "scalar"}
"""What each role's model computes."""
