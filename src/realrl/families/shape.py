"""The shape of a decoder model: sizes only, no weights and no torch."""

from typing import Annotated, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from realrl.config.base import Settings

Head = Literal["lm", "scalar"]
"""`lm`: a next-token distribution per position; `scalar`: one number per position (reward and critic)."""


Size = Annotated[int, Field(gt=0, le=10**9)]
"""A width; a thousand times what there is."""

Count = Annotated[int, Field(gt=0, le=10**4)]
"""Of layers and of heads, which are gone through one by one; some ten times what there is."""


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

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor={self.low_freq_factor:g} must be below high_freq_factor={self.high_freq_factor:g}"
            )
        return self


class ModelShape(Settings):
    """Sizes of a decoder-only transformer."""

    family: str = "llama"
    """Model family, which decides the tensors, the options of layers and the configuration class: the name of a
    registered one, or a file of your own, FILE.py. A shape that names none is a Llama."""
    vocab_size: Size
    """Rows of the embedding table."""
    hidden_size: Size
    """Width of the residual stream."""
    intermediate_size: Size
    """Width inside the feed-forward block."""
    layers: Count
    """Number of decoder layers."""
    heads: Count
    """Number of query heads."""
    kv_heads: Count
    """Number of key/value heads; `heads` must be a multiple of it."""
    head_dim: Size
    """Width of one attention head."""
    max_positions: Size = 2048
    """Longest sequence, in tokens, the model is declared for."""
    rope_theta: PositiveFloat = 10000.0
    """Base of the rotary frequencies."""
    rope_scaling: RopeScaling | None = None
    """Frequency stretching of Llama 3.1 and later; none for plain rotary embeddings."""
    norm_eps: PositiveFloat = 1e-5
    """Epsilon inside the norms."""
    tied_embeddings: bool = False
    """Whether the language-model head shares the embedding table."""
    init_std: float = Field(default=0.02, gt=0, le=10)
    """Standard deviation of a freshly initialised weight."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd; rotary embeddings need an even one")
        return self
