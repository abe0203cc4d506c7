"""The decoder: one code path for training, inference and generation."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from realrl.config.shape import Head, ModelShape
from realrl.model.attention import attention, decode_attention, split_heads
from realrl.model.cache import KVCache
from realrl.model.logprobs import token_logprobs
from realrl.model.ops import linear, rms_norm, rotate, swiglu
from realrl.model.packing import Packing
from realrl.model.rotary import frequencies, rotary

LAYER_SOURCES = {
    "attention_norm": ("input_layernorm",),
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "out": ("self_attn.o_proj",),
    "mlp_norm": ("post_attention_layernorm",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
"""Parameter of a layer -> the canonical tensors it is made of, stacked by rows."""

Attend = Callable[[int, Tensor], Tensor]
"""(layer, rotated qkv [T, C]) -> attention's output [T, heads * D]."""


class Layer(nn.Module):
    """Pre-norm attention and feed-forward blocks, each added to the residual stream."""

    def __init__(self, shape: ModelShape, weight: Callable[[str], nn.Parameter]) -> None:
        super().__init__()
        self.eps = shape.norm_eps
        self.attention_norm = weight("attention_norm")
        self.qkv = weight("qkv")
        self.out = weight("out")
        self.mlp_norm = weight("mlp_norm")
        self.gate_up = weight("gate_up")
        self.down = weight("down")

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Callable[[Tensor], Tensor]) -> Tensor:
        """x: [T, H] -> [T, H]; cos, sin: [T, rotated heads, D]"""
        qkv = linear(rms_norm(x, self.attention_norm, self.eps), self.qkv)
        x = x + linear(attend(rotate(qkv, cos, sin)), self.out)
        gate_up = linear(rms_norm(x, self.mlp_norm, self.eps), self.gate_up)
        return x + linear(swiglu(gate_up), self.down)


class Transformer(nn.Module):
    """A decoder whose parameters are views of storage that somebody else owns.

    `weights(*names)` returns the view over these canonical tensors, stacked by rows. `sources` maps each
    parameter's name to the canonical tensors it is made of.
    """

    def __init__(self, shape: ModelShape, head: Head, weights: Callable[..., Tensor]) -> None:
        super().__init__()
        self.shape, self.head_kind = shape, head
        self.sources: dict[str, tuple[str, ...]] = {}

        def parameter(name: str, *tensors: str) -> nn.Parameter:
            self.sources[name] = tuple(f"{tensor}.weight" for tensor in tensors)
            return nn.Parameter(weights(*self.sources[name]))

        def layer(i: int) -> Layer:
            def of_layer(name: str) -> nn.Parameter:
                tensors = (f"model.layers.{i}.{tensor}" for tensor in LAYER_SOURCES[name])
                return parameter(f"layers.{i}.{name}", *tensors)

            return Layer(shape, of_layer)

        self.embedding = parameter("embedding", "model.embed_tokens")
        self.layers = nn.ModuleList(layer(i) for i in range(shape.layers))
        self.norm = parameter("norm", "model.norm")
        self.head: nn.Parameter | None = None
        if head == "scalar":
            self.head = parameter("head", "score")
        elif not shape.tied_embeddings:
            self.head = parameter("head", "lm_head")
        self.frequency = frequencies(shape).to(self.embedding.device)

    def forward(self, tokens: Tensor, packing: Packing) -> Tensor:
        """Hidden states after the last norm. tokens: [T] -> [T, H]"""
        shape = self.shape

        def attend(_: int, qkv: Tensor) -> Tensor:
            return attention(qkv, packing, shape.heads, shape.kv_heads)

        return self._run(tokens, packing.positions, attend)

    def prefill(self, tokens: Tensor, packing: Packing, cache: KVCache) -> Tensor:
        """Like `forward`, and fills the empty cache, one row per sequence. tokens: [T] -> [T, H]"""
        shape = self.shape
        cache.start(packing)

        def attend(layer: int, qkv: Tensor) -> Tensor:
            _, k, v = split_heads(qkv, shape.heads, shape.kv_heads)
            cache.store(layer, k, v, packing)
            return attention(qkv, packing, shape.heads, shape.kv_heads)

        return self._run(tokens, packing.positions, attend)

    def decode(self, tokens: Tensor, cache: KVCache) -> Tensor:
        """The next token of every row of the cache. tokens: [B] -> [B, H]"""
        positions = cache.lengths
        visible = cache.grow()

        def attend(layer: int, qkv: Tensor) -> Tensor:
            q, k, v = split_heads(qkv, self.shape.heads, self.shape.kv_heads)
            return decode_attention(q, *cache.append(layer, k, v), visible)

        return self._run(tokens, positions, attend)

    def _run(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        x = F.embedding(tokens, self.embedding)
        cos, sin = rotary(positions, self.frequency, self.shape.heads + self.shape.kv_heads, x.dtype)
        for i, layer in enumerate(self.layers):
            x = layer(x, cos, sin, lambda qkv, i=i: attend(i, qkv))
        return rms_norm(x, self.norm, self.shape.norm_eps)

    @property
    def _vocabulary(self) -> Tensor:
        assert self.head_kind == "lm", "a scalar head has no vocabulary"
        return self.embedding if self.head is None else self.head

    def logits(self, hidden: Tensor) -> Tensor:
        """Unscaled next-token logits. hidden: [N, H] -> [N, V] float32"""
        return linear(hidden, self._vocabulary).float()

    def logprobs(
        self, hidden: Tensor, tokens: Tensor, packing: Packing, *, temperature: float, entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """log p(token t | tokens before it), 0 at the first token of each sequence, logits divided by
        `temperature`; and likewise the entropy of the distribution that token t is drawn from, in nats.

        hidden: [T, H], tokens: [T] -> [T] float32, and [T] float32 without gradient or None
        """
        index = packing.predicted
        before = hidden.index_select(0, index - 1)
        chosen, spread = token_logprobs(
            before, self._vocabulary, tokens[index], temperature=temperature, entropy=entropy
        )
        zeros = torch.zeros(len(tokens), dtype=torch.float32, device=hidden.device)
        full = zeros.index_copy(0, index, chosen)
        return full, None if spread is None else zeros.index_copy(0, index, spread)

    def values(self, hidden: Tensor) -> Tensor:
        """The scalar head's number at every position. hidden: [T, H] -> [T] float32"""
        assert self.head_kind == "scalar" and self.head is not None, "a language-model head has no values"
        return (hidden.float() @ self.head.float().T).squeeze(-1)
