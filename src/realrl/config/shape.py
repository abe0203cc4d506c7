"""The shape of a decoder model: sizes only, no weights and no torch."""

from typing import Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from realrl.config.base import Settings

Head = Literal["lm", "scalar"]
"""`lm`: a next-token distribution per position; `scalar`: one number per position (reward and critic)."""


class RopeScaling(Settings):
    """Llama 3's stretched rotary frequencies (Hugging Face `rope_type: llama3`)."""

    factor: PositiveFloat
    """Low frequencies are divided by this."""
    low_freq_factor: PositiveFloat
    """Wavelengths above the original length over this are stretched in full."""
    high_freq_factor: PositiveFloat
    """Wavelengths below the original length over this are left alone."""
    original_max_position_embeddings: PositiveInt
    """Length, in tokens, the model was first trained for."""


class ModelShape(Settings):
    """Sizes of a decoder-only transformer."""

    family: Literal["llama"] = "llama"
    """Model family: decides the Hugging Face names and configuration class."""
    vocab_size: PositiveInt
    """Rows of the embedding table."""
    hidden_size: PositiveInt
    """Width of the residual stream."""
    intermediate_size: PositiveInt
    """Width inside the feed-forward block."""
    layers: PositiveInt
    """Number of decoder layers."""
    heads: PositiveInt
    """Number of query heads."""
    kv_heads: PositiveInt
    """Number of key/value heads; `heads` must be a multiple of it."""
    head_dim: PositiveInt
    """Width of one attention head."""
    max_positions: PositiveInt = 2048
    """Longest sequence, in tokens, the model is declared for."""
    rope_theta: PositiveFloat = 10000.0
    """Base of the rotary frequencies."""
    rope_scaling: RopeScaling | None = None
    """Frequency stretching of Llama 3.1 and later; none for plain rotary embeddings."""
    norm_eps: PositiveFloat = 1e-5
    """Epsilon inside RMSNorm."""
    tied_embeddings: bool = False
    """Whether the language-model head shares the embedding table."""
    init_std: PositiveFloat = Field(default=0.02)
    """Standard deviation of a freshly initialised weight."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd; rotary embeddings need an even one")
        return self
