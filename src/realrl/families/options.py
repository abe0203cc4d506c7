"""Options in which the layers of decoders differ."""

from typing import Literal

from pydantic import PositiveFloat

from realrl.config.base import Settings

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
