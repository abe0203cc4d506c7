"""The shape of a decoder model: sizes and what its layers compute, no weights and no torch."""

from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from realrl.config.base import DERIVED, Settings
from realrl.families.adapters import LowRank
from realrl.families.tensors import Quantisation

Activation = Literal["silu", "gelu", "gelu_tanh"]
"""`gelu_tanh` is GELU's approximation by a tanh."""


class LayerOptions(Settings):
    """Options of the layers of a decoder, which by default are Llama's."""

    norm: Literal["rms", "layer"] = "rms"
    """RMSNorm, or LayerNorm with a bias."""
    norm_offset: bool = False
    """Whether norms multiply by 1 + weight (Gemma), so that weights start at 0."""
    norm_place: Literal["before", "after", "around"] = "before"
    """Where the norms of a block are: at its input, at its output before that is added (OLMo 2), or at both."""
    parallel_blocks: bool = False
    """Whether attention and feed-forward block read the same input, and both are added to it (GPT-NeoX)."""
    qk_norm: Literal["none", "heads", "all", "rotated"] = "none"
    """RMSNorm of queries and keys: none, of each head over its dims, over all heads together (OLMo 2), or of each
    head after its rotation, without weights, in layers that rotate heads (Llama 4)."""
    qkv_bias: bool = False
    """Whether the projections to queries, keys and values have biases."""
    out_bias: bool = False
    """Whether attention's output projection has one."""
    mlp_bias: bool = False
    """Whether the matrices of the feed-forward block have biases."""
    head_bias: bool = False
    """Whether the language-model head has a bias."""
    activation: Activation = "silu"
    """Activation of the feed-forward block."""
    gated: bool = True
    """Whether the activation of one matrix multiplies the output of another one; else there is one matrix."""
    learned_positions: bool = False
    """Whether a learned vector for its position is added to each embedding, instead of rotary embeddings."""
    attention_scale: PositiveFloat | None = None
    """Factor of attention's scores; 1 / sqrt(head_dim) where it is not given."""
    attention_cap: PositiveFloat | None = None
    """Bound c of attention's scores x, which become c * tanh(x / c) (Gemma 2)."""
    sinks: bool = False
    """Whether each head has a learned further score in its softmax, whose weight goes to nothing (gpt-oss)."""
    embedding_scale: PositiveFloat | Literal["root"] = 1.0
    """Factor of embeddings, rounded to their type; `root` is that of the hidden size (Gemma)."""
    residual_scale: PositiveFloat = 1.0
    """Factor of what a block adds to the residual stream."""
    logit_scale: PositiveFloat = 1.0
    """Factor of the logits."""
    logit_cap: PositiveFloat | None = None
    """Bound of the logits, as that of scores."""

    @property
    def scores_in_memory(self) -> bool:
        """Whether attention on a GPU computes scores in memory: no kernel of a library knows caps and sinks."""
        return self.attention_cap is not None or self.sinks


MOST_EXPERTS = 10**4
Experts = Annotated[int, Field(gt=0, le=MOST_EXPERTS)]
"""Number of experts, which are gone through one by one; some ten times what there is."""


class Mixture(Settings):
    """Feed-forward blocks of a layer, of which a router chooses some for each token."""

    experts: Experts
    """Feed-forward blocks of a layer, each as wide as `intermediate_size`."""
    per_token: Experts
    """Experts that a token passes through: those to which the router gives the highest scores."""
    scores: Literal["softmax", "sigmoid"] = "softmax"
    """What the router's numbers become: probabilities that add up to 1, or each by itself one from 0 to 1."""
    normalised: bool = True
    """Whether the weights of a token's experts are their scores divided by the sum of these."""
    weighed: Literal["outputs", "inputs"] = "outputs"
    """What the weights multiply: what experts give, or what they are given (Llama 4)."""
    shared: bool = False
    """Whether all tokens pass through one more block, as wide as an expert, besides."""

    @model_validator(mode="after")
    def _enough(self) -> Self:
        if self.per_token > self.experts:
            raise ValueError(f"per_token={self.per_token} is more than the {self.experts} experts of a layer")
        return self


Head = Literal["lm", "scalar"]
"""`lm`: a next-token distribution per position; `scalar`: one number per position (reward and critic)."""


Size = Annotated[int, Field(gt=0, le=10**9)]
"""A width; a thousand times what there is."""

MOST_LAYERS = 10**4
Count = Annotated[int, Field(gt=0, le=MOST_LAYERS)]
"""Of layers and of heads, which are gone through one by one; some ten times what there is."""

Index = Annotated[int, Field(ge=0)]


class RopeScaling(Settings):
    """Stretched rotary frequencies, under the names that Hugging Face files have for them."""

    kind: Literal["linear", "dynamic", "yarn", "llama3", "longrope"] = "llama3"
    """`linear` divides all frequencies. `dynamic` leaves them as they are up to `max_positions`, which no sequence
    exceeds here. `yarn` (arXiv 2309.00071) and `llama3` divide low ones and blend in between, `longrope` (arXiv
    2402.13753) divides each by a factor of its own."""
    factor: PositiveFloat
    """Low frequencies are divided by this. With `longrope`, the longest sequence over the original one."""
    original_max_position_embeddings: PositiveInt | None = None
    """Length, in tokens, the model was first trained for."""
    low_freq_factor: PositiveFloat | None = None
    """llama3: wavelengths above the original length over this are stretched in full."""
    high_freq_factor: PositiveFloat | None = None
    """llama3: wavelengths below the original length over this are left alone."""
    beta_fast: PositiveFloat = 32.0
    """yarn: frequencies with more rotations than this in the original length are left alone."""
    beta_slow: PositiveFloat = 1.0
    """yarn: frequencies with fewer rotations than this are stretched in full."""
    truncate: bool = True
    """yarn: whether the range in between ends at whole numbers of dims."""
    mscale: float | None = None
    """yarn: with `mscale_all_dim`, the coefficients of the logarithms of which `attention_factor` is made."""
    mscale_all_dim: float | None = None
    """yarn: see `mscale`."""
    attention_factor: PositiveFloat | None = None
    """yarn and longrope: factor of cosines and sines, hence the root of that of scores. If not given, it follows
    from `factor`."""
    short_factor: tuple[PositiveFloat, ...] | None = Field(default=None, strict=False)
    """longrope: divisors of the frequencies, for sequences up to the original length."""
    long_factor: tuple[PositiveFloat, ...] | None = Field(default=None, strict=False)
    """longrope: divisors where sequences may be longer."""
    long: bool = False
    """longrope: whether that is so. A run decides it for all its sequences, whose keys must not change."""

    @model_validator(mode="after")
    def _complete(self) -> Self:
        for name in SCALING_FIELDS[self.kind]:
            if getattr(self, name) is None:
                raise ValueError(f"{name} is missing, which kind={self.kind} needs")
        low, high = self.low_freq_factor, self.high_freq_factor
        if self.kind == "llama3" and low is not None and high is not None and low > high:
            raise ValueError(f"low_freq_factor={low:g} must be at most high_freq_factor={high:g}")
        return self


SCALING_FIELDS: Mapping[str, tuple[str, ...]] = {
    "linear": (),
    "dynamic": (),
    "yarn": ("original_max_position_embeddings",),
    "llama3": ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "longrope": ("original_max_position_embeddings", "short_factor", "long_factor"),
}
"""Fields that a kind of scaling needs besides `factor`."""
OPTIONAL_SCALING_FIELDS: Mapping[str, tuple[str, ...]] = {
    "yarn": ("beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim", "attention_factor"),
    "longrope": ("attention_factor",),
}
"""Fields that it may have."""


class ModelShape(Settings):
    """Sizes of a decoder-only transformer, and what its layers compute."""

    family: str = "llama"
    """Model family, which decides the tensors, the options of layers and the configuration class: the name of a
    registered one, or a file of your own, FILE.py. A shape that names none is a Llama."""
    vocab_size: Size
    """Rows of the embedding table."""
    hidden_size: Size
    """Width of the residual stream."""
    intermediate_size: Size
    """Width inside the feed-forward block, or inside each expert."""
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
    """Stretching of the frequencies; none for plain rotary embeddings."""
    rotary_dim: Size | None = None
    """Dims of a head that are rotated; all where it is not given."""
    unrotated_layers: tuple[Index, ...] = Field(default=(), strict=False)  # YAML has lists, not tuples
    """Layers without rotary embeddings (SmolLM 3)."""
    window: Size | None = None
    """Tokens that a token of a windowed layer sees, itself included."""
    windowed_layers: tuple[Index, ...] = Field(default=(), strict=False)
    """Layers with a sliding window; all others see every token before."""
    windowed_rope_theta: PositiveFloat | None = None
    """Base of the rotary frequencies of windowed layers, which are not stretched then (Gemma 3)."""
    norm_eps: PositiveFloat = 1e-5
    """Epsilon inside the norms."""
    tied_embeddings: bool = False
    """Whether the language-model head shares the embedding table."""
    init_std: float = Field(default=0.02, gt=0, le=10)
    """Standard deviation of a freshly initialised weight."""
    mixture: Mixture | None = None
    """Experts of each layer and their router; none where a layer has one feed-forward block."""
    layer: LayerOptions | None = None
    """What layers compute; what the family's usually do where it is not given."""
    lora: LowRank | None = Field(default=None, json_schema_extra=DERIVED)
    """Low-rank adapters of a role (`models.ROLE.lora`), which are no part of its `config.json`."""
    quantised: Quantisation | None = Field(default=None, json_schema_extra=DERIVED)
    """What the matrices of layers are stored as (`models.ROLE.dtype`); None for the type of all else."""
    grown_from: Size | None = Field(default=None, json_schema_extra=DERIVED)
    """Rows that the embedding table has in the model's files, if a role adds some (`models.ROLE.vocab_size`)."""

    def for_lengths(self, longest: int) -> "ModelShape":
        """Return the shape for sequences of up to so many tokens, as `RopeScaling.long` needs to know."""
        scaling = self.rope_scaling
        if scaling is None or scaling.kind != "longrope" or scaling.original_max_position_embeddings is None:
            return self
        long = longest > scaling.original_max_position_embeddings
        return self.model_copy(update={"rope_scaling": scaling.model_copy(update={"long": long})})

    def with_layers(self, layers: int) -> "ModelShape":
        """Return the shape with another number of layers, of which about the same share have a window.

        Where some have one and others have none, so do the second and the third of three or more.
        """
        share = len(self.windowed_layers) / self.layers
        count = round(share * layers)
        if 0 < share < 1 and layers > 2:
            count = min(max(count, 1), layers - 1)
        order = sorted(range(layers), key=lambda layer: (layer == 2, layer != 1))
        return self.model_copy(update={"layers": layers, "windowed_layers": tuple(sorted(order[:count]))})

    def layer_kind(self, layer: int) -> tuple[bool, bool]:
        """Tell layers apart that compute differently: whether one has a window, and whether it rotates heads."""
        return layer in self.windowed_layers, layer not in self.unrotated_layers

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd; rotary embeddings need an even one")
        rotated = self.rotary_dim or self.head_dim
        if rotated % 2 or rotated > self.head_dim:
            raise ValueError(f"rotary_dim={rotated} must be even, and at most head_dim={self.head_dim}")
        for name in ("unrotated_layers", "windowed_layers"):
            numbers = getattr(self, name)
            if list(numbers) != sorted({*numbers}) or any(n >= self.layers for n in numbers):
                raise ValueError(f"{name} must be numbers of layers below layers={self.layers}, in order")
        if self.windowed_layers and self.window is None:
            raise ValueError("windowed_layers needs a window")
        scaling = self.rope_scaling
        if scaling is not None and scaling.kind == "longrope":
            for name in ("short_factor", "long_factor"):
                if len(getattr(scaling, name)) != rotated // 2:
                    raise ValueError(
                        f"rope_scaling.{name} must have {rotated // 2} numbers, one per frequency"
                    )
        return self
