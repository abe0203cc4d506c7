"""The shape of a decoder model: its sizes, and what its layers compute. This module does not import torch."""

from collections.abc import Mapping
from functools import lru_cache
from math import inf
from typing import Annotated, Literal, NamedTuple, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from realrl.config.base import DERIVED, Settings
from realrl.families.adapters import LowRank
from realrl.families.tensors import Quantisation

Activation = Literal["silu", "gelu", "gelu_tanh", "clamped_silu"]
"""`gelu_tanh` is GELU's approximation by a tanh. `clamped_silu` is a steeper silu of bounded numbers, always with a
gate (gpt-oss; `SWIGLU` has the formula)."""


class SwiGLU(NamedTuple):
    """Numbers in a gated activation, which computes g * sigmoid(slope * g) * (u + offset).

    g is the gate, bounded above by `limit`. u is the number that it multiplies, bounded by -`limit` and `limit`.
    """

    slope: float
    limit: float
    offset: float


SWIGLU: Mapping[Activation, SwiGLU] = {
    "silu": SwiGLU(slope=1.0, limit=inf, offset=0.0),
    "clamped_silu": SwiGLU(slope=1.702, limit=7.0, offset=1.0),
}
"""Gated activations that one kernel computes, forward and backward."""


class LayerOptions(Settings):
    """What the layers of a decoder compute; the defaults are Llama's."""

    norm: Literal["rms", "layer"] = "rms"
    """RMSNorm, or LayerNorm with a bias."""
    norm_offset: bool = False
    """Whether norms multiply by 1 + weight (Gemma), so that weights start at 0."""
    norm_place: Literal["before", "after", "around"] = "before"
    """Norms at the input of a block, at its output before the output is added (OLMo 2), or at both places."""
    parallel_blocks: bool = False
    """Whether attention and feed-forward block read the same input, to which both outputs are added (GPT-NeoX)."""
    qk_norm: Literal["none", "heads", "all", "rotated"] = "none"
    """RMSNorm of queries and keys. `heads` normalises each head over its dims. `all` normalises all heads together
    (OLMo 2). `rotated` normalises each head after its rotation, without weights, and only in layers that rotate
    heads (Llama 4)."""
    qkv_bias: bool = False
    """Whether the projections to queries, keys and values have biases."""
    out_bias: bool = False
    """Whether the output projection of attention has a bias."""
    mlp_bias: bool = False
    """Whether the matrices of the feed-forward block have biases. In a mixture, the router and the experts have
    them."""
    head_bias: bool = False
    """Whether the language-model head has a bias."""
    activation: Activation = "silu"
    """Activation of the feed-forward block."""
    gated: bool = True
    """Whether the activated output of one matrix multiplies the output of a second matrix. Otherwise there is no
    second matrix."""
    learned_positions: bool = False
    """Whether a learned vector per position is added to embeddings, instead of rotary embeddings."""
    attention_scale: PositiveFloat | None = None
    """Factor of attention scores; null for 1 / sqrt(head_dim)."""
    attention_cap: PositiveFloat | None = None
    """Bound c of attention scores: a score x becomes c * tanh(x / c) (Gemma 2)."""
    sinks: bool = False
    """Whether the softmax of each head has an additional learned score, whose weight goes to no token (gpt-oss)."""
    embedding_scale: PositiveFloat | Literal["root"] = 1.0
    """Factor of embeddings, rounded to their dtype; `root` is the square root of the hidden size (Gemma)."""
    residual_scale: PositiveFloat = 1.0
    """Factor of each block's output before it is added to the residual stream (Granite)."""
    logit_scale: PositiveFloat = 1.0
    """Factor of the logits."""
    logit_cap: PositiveFloat | None = None
    """Bound of the logits, applied like `attention_cap`."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.activation == "clamped_silu" and not self.gated:
            raise ValueError("activation=clamped_silu needs gated=true")
        return self

    @property
    def scores_in_memory(self) -> bool:
        """Whether attention on a GPU must write its scores to memory, because library kernels support neither caps
        nor sinks."""
        return self.attention_cap is not None or self.sinks


MOST_EXPERTS = 10**4
Experts = Annotated[int, Field(gt=0, le=MOST_EXPERTS)]
"""Number of experts. Code loops over experts, so the limit is about ten times the largest published number."""


class Mixture(Settings):
    """A mixture of experts: a router chooses some of a layer's feed-forward blocks for each token."""

    experts: Experts
    """Number of feed-forward blocks in each layer, each `intermediate_size` wide."""
    per_token: Experts
    """Number of experts that each token passes through. They are the experts with the highest router scores."""
    scores: Literal["softmax", "sigmoid"] = "softmax"
    """How router outputs become scores: probabilities that add up to 1 (`softmax`), or independent numbers between
    0 and 1 (`sigmoid`)."""
    correction: bool = False
    """Whether each expert has a stored number that is added to its score when experts are chosen, but not when they
    are weighed (GLM-4.5). Training does not change these numbers."""
    groups: Experts = 1
    """Number of groups of neighbouring experts. All experts of a token belong to `groups_per_token` groups: those
    whose two highest scores have the largest sums."""
    groups_per_token: Experts = 1
    """Number of groups that a token's experts may belong to."""
    normalised: bool = True
    """Whether the weights of a token's experts are their scores divided by the sum of these scores."""
    scale: PositiveFloat = 1.0
    """Factor of the weights of experts."""
    weighed: Literal["outputs", "inputs"] = "outputs"
    """Whether weights multiply the outputs of experts or their inputs (Llama 4)."""
    shared: Annotated[int, Field(ge=0, le=MOST_EXPERTS)] = 0
    """Number of shared experts, which all tokens pass through. They are one block, `shared` times as wide as an
    expert."""

    @model_validator(mode="after")
    def _enough(self) -> Self:
        if self.per_token > self.experts:
            raise ValueError(f"per_token={self.per_token} is more than the {self.experts} experts of a layer")
        size, rest = divmod(self.experts, self.groups)
        if rest or (self.groups > 1 and size < 2):
            raise ValueError(
                f"groups={self.groups} must divide experts={self.experts} into groups of 2 or more"
            )
        if self.groups_per_token > self.groups:
            raise ValueError(f"groups_per_token={self.groups_per_token} is more than groups={self.groups}")
        if self.per_token > self.groups_per_token * size:
            raise ValueError(
                f"per_token={self.per_token} is more than the experts of groups_per_token={self.groups_per_token}"
                f" groups of {size}"
            )
        return self


Head = Literal["lm", "scalar"]
"""`lm`: a next-token distribution per position; `scalar`: one number per position (reward and critic)."""


Size = Annotated[int, Field(gt=0, le=10**9)]
"""A width. The limit is about a thousand times the largest published width."""

MOST_LAYERS = 10**4
Count = Annotated[int, Field(gt=0, le=MOST_LAYERS)]
"""Number of layers or heads. Code loops over layers and heads, so the limit is about ten times the largest
published number."""

Index = Annotated[int, Field(ge=0)]


class RopeScaling(Settings):
    """Scaling of rotary frequencies for longer sequences, with the names of Hugging Face files."""

    kind: Literal["linear", "dynamic", "yarn", "llama3", "longrope"] = "llama3"
    """`linear` divides all frequencies. `dynamic` changes nothing up to `max_positions`, which sequences here
    never exceed. `yarn` (arXiv 2309.00071) and `llama3` divide low frequencies and blend in between. `longrope`
    (arXiv 2402.13753) divides each frequency by its own factor."""
    factor: PositiveFloat
    """Divisor of low frequencies. With `longrope`, the ratio of the longest sequence to the original length."""
    original_max_position_embeddings: PositiveInt | None = None
    """Length, in tokens, that the model was first trained for."""
    low_freq_factor: PositiveFloat | None = None
    """llama3: wavelengths above (original length / this number) are scaled in full."""
    high_freq_factor: PositiveFloat | None = None
    """llama3: wavelengths below (original length / this number) are not scaled."""
    beta_fast: PositiveFloat = 32.0
    """yarn: frequencies with more than this number of rotations within the original length are not scaled."""
    beta_slow: PositiveFloat = 1.0
    """yarn: frequencies with less than this number of rotations within the original length are scaled in full."""
    truncate: bool = True
    """yarn: whether the blended range starts and ends at whole dims."""
    mscale: float | None = None
    """yarn: `mscale` and `mscale_all_dim` are coefficients of the logarithms that determine `attention_factor`."""
    mscale_all_dim: float | None = None
    """yarn: see `mscale`."""
    attention_factor: PositiveFloat | None = None
    """yarn and longrope: factor of cosines and sines, which multiplies scores twice. If not given, it follows from
    `factor`."""
    short_factor: tuple[PositiveFloat, ...] | None = Field(default=None, strict=False)
    """longrope: divisors of the frequencies, for sequences up to the original length."""
    long_factor: tuple[PositiveFloat, ...] | None = Field(default=None, strict=False)
    """longrope: divisors of the frequencies, if sequences may be longer."""
    long: bool = False
    """longrope: whether `long_factor` applies. A run decides this once for all its sequences, because cached keys
    must not change."""

    @model_validator(mode="after")
    def _complete(self) -> Self:
        for name in SCALING_FIELDS[self.kind]:
            if getattr(self, name) is None:
                raise ValueError(f"{name} is missing; kind={self.kind} needs it")
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
"""Fields that each kind of scaling needs in addition to `factor`."""
OPTIONAL_SCALING_FIELDS: Mapping[str, tuple[str, ...]] = {
    "yarn": ("beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim", "attention_factor"),
    "longrope": ("attention_factor",),
}
"""Fields that each kind of scaling may have."""


class ModelShape(Settings):
    """Sizes of a decoder-only transformer, and what its layers compute."""

    family: str = "llama"
    """Model family: the name of a registered family, or a file of your own, FILE.py. The family determines the
    tensors, what layers compute by default, and the configuration class of transformers."""
    vocab_size: Size
    """Rows of the embedding table."""
    hidden_size: Size
    """Width of the residual stream."""
    intermediate_size: Size
    """Width inside the feed-forward block, or inside each expert of a mixture."""
    layers: Count
    """Number of decoder layers."""
    heads: Count
    """Number of query heads."""
    kv_heads: Count
    """Number of key/value heads; `heads` must be a multiple of it."""
    head_dim: Size
    """Width of one attention head."""
    max_positions: Size = 2048
    """Longest sequence, in tokens, that the model supports."""
    rope_theta: PositiveFloat = 10000.0
    """Base of the rotary frequencies."""
    rope_scaling: RopeScaling | None = None
    """Scaling of the rotary frequencies; null for none."""
    rotary_dim: Size | None = None
    """Number of dims of each head that are rotated; null for all."""
    unrotated_layers: tuple[Index, ...] = Field(default=(), strict=False)  # YAML has lists, not tuples
    """Layers without rotary embeddings (SmolLM 3)."""
    window: Size | None = None
    """Number of tokens that a token of a windowed layer sees, itself included."""
    windowed_layers: tuple[Index, ...] = Field(default=(), strict=False)
    """Layers with a sliding window. In all other layers, a token sees every token before it."""
    windowed_rope_theta: PositiveFloat | None = None
    """Base of the rotary frequencies of windowed layers (Gemma 3). These frequencies are not scaled. null if all
    layers have the same frequencies."""
    norm_eps: PositiveFloat = 1e-5
    """Epsilon inside the norms."""
    tied_embeddings: bool = False
    """Whether the language-model head shares the embedding table."""
    init_std: float = Field(default=0.02, gt=0, le=10)
    """Standard deviation of a freshly initialised weight."""
    mixture: Mixture | None = None
    """Experts of each layer and their router; null for one feed-forward block per layer."""
    dense_layers: tuple[Index, ...] = Field(default=(), strict=False)
    """Layers of a mixture that have one feed-forward block in place of experts."""
    dense_size: Size | None = None
    """Width inside the feed-forward block of these layers."""
    layer: LayerOptions | None = None
    """Options of layers; null for the usual options of the family."""
    lora: LowRank | None = Field(default=None, json_schema_extra=DERIVED)
    """Low-rank adapters of a role (`models.ROLE.lora`); they are not part of its `config.json`."""
    quantised: Quantisation | None = Field(default=None, json_schema_extra=DERIVED)
    """Byte format of the matrices of layers (`models.ROLE.dtype`); None if they have the model's dtype."""
    grown_from: Size | None = Field(default=None, json_schema_extra=DERIVED)
    """Rows of the embedding table in the model's files, if the role adds rows (`models.ROLE.vocab_size`)."""

    def for_lengths(self, longest: int) -> "ModelShape":
        """Copy the shape for sequences of at most `longest` tokens; this decides `RopeScaling.long`."""
        scaling = self.rope_scaling
        if scaling is None or scaling.kind != "longrope" or scaling.original_max_position_embeddings is None:
            return self
        long = longest > scaling.original_max_position_embeddings
        return self.model_copy(update={"rope_scaling": scaling.model_copy(update={"long": long})})

    def with_layers(self, layers: int) -> "ModelShape":
        """Copy the shape with another number of layers, which must all have the same kind of feed-forward block.
        About the same share of the layers has a window.

        If only some layers have a window, and the copy has more than two layers, the copy also has layers of both
        kinds. Its second layer then has a window, and its third layer has none.
        """
        assert not self.dense_layers, "`split_kinds` makes shapes with one kind of layer"
        share = len(self.windowed_layers) / self.layers
        count = round(share * layers)
        if 0 < share < 1 and layers > 2:
            count = min(max(count, 1), layers - 1)
        # Layer 1 gets a window first and layer 2 last, so that even few layers have both kinds.
        order = sorted(range(layers), key=lambda layer: (layer == 2, layer != 1))
        return self.model_copy(update={"layers": layers, "windowed_layers": tuple(sorted(order[:count]))})

    def attention_kind(self, layer: int) -> tuple[bool, bool]:
        """Return whether a layer has a window, and whether it rotates heads. Layers that agree in both rotate heads
        in the same way."""
        return layer in self.windowed_layers, layer not in self.unrotated_layers

    def mixture_of(self, layer: int) -> Mixture | None:
        """Return the experts of a layer; None if it has one feed-forward block."""
        return None if layer in self.dense_layers else self.mixture

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd; rotary embeddings need an even one")
        rotated = self.rotary_dim or self.head_dim
        if rotated % 2 or rotated > self.head_dim:
            raise ValueError(f"rotary_dim={rotated} must be even, and at most head_dim={self.head_dim}")
        for name in ("unrotated_layers", "windowed_layers", "dense_layers"):
            numbers = getattr(self, name)
            if list(numbers) != sorted({*numbers}) or any(n >= self.layers for n in numbers):
                raise ValueError(f"{name} must list layers below layers={self.layers}, in ascending order")
        if self.windowed_layers and self.window is None:
            raise ValueError("windowed_layers needs a window")
        if self.dense_layers and self.mixture is None:
            raise ValueError("dense_layers needs a mixture; without one, all layers are dense")
        if bool(self.dense_layers) != (self.dense_size is not None):
            raise ValueError("dense_layers and dense_size need each other")
        if len(self.dense_layers) == self.layers:
            raise ValueError("dense_layers lists all layers; at least one layer of a mixture needs experts")
        scaling = self.rope_scaling
        if scaling is not None and scaling.kind == "longrope":
            for name in ("short_factor", "long_factor"):
                if len(getattr(scaling, name)) != rotated // 2:
                    raise ValueError(
                        f"rope_scaling.{name} must have {rotated // 2} numbers, one per frequency"
                    )
        return self


class LayerKind(NamedTuple):
    """Layers of a model with the same kind of feed-forward block."""

    shape: ModelShape
    """The shape of a model that has only such layers, and as many as the whole model."""
    layers: tuple[int, ...]
    """Numbers of these layers in the whole model, ascending."""


@lru_cache(maxsize=256)
def split_kinds(shape: ModelShape) -> tuple[LayerKind, ...]:
    """Divide the layers of a model by their feed-forward blocks: layers with experts, and dense layers if it has
    any. The layers of all other models are of one kind."""
    if not shape.dense_layers:
        return (LayerKind(shape, tuple(range(shape.layers))),)
    alike = {"dense_layers": (), "dense_size": None}
    dense = {**alike, "mixture": None, "intermediate_size": shape.dense_size}
    others = tuple(layer for layer in range(shape.layers) if layer not in shape.dense_layers)
    return (
        LayerKind(shape.model_copy(update=alike), others),
        LayerKind(shape.model_copy(update=dense), shape.dense_layers),
    )
