"""Decoder with one code path for training, inference and generation, whole or as one rank's shard."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from realrl.layout.ranges import padded_vocabulary
from realrl.layout.shard import Shard
from realrl.model.attention import attention, decode_attention, split_heads
from realrl.model.cache import KVCache
from realrl.model.group import Group
from realrl.model.logprobs import token_logprobs
from realrl.model.ops import linear, product, rms_norm, rotate, swiglu
from realrl.model.packing import Packing
from realrl.model.recompute import recomputed
from realrl.model.rotary import frequencies, rotary
from realrl.model.tensor_parallel import TensorParallel

LAYER_SOURCES = {
    "attention_norm": ("input_layernorm",),
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "out": ("self_attn.o_proj",),
    "mlp_norm": ("post_attention_layernorm",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
"""Parameter of a layer -> canonical tensors that it stacks by rows."""

Attend = Callable[[int, Tensor], Tensor]
"""Attention function: (layer of the stage, rotated qkv [T, C]) -> output [T, query heads * D]."""


class Layer(nn.Module):
    """Pre-norm attention and feed-forward blocks, each added to the residual stream."""

    def __init__(self, eps: float, weight: Callable[[str], nn.Parameter]) -> None:
        super().__init__()
        self.eps = eps
        self.attention_norm = weight("attention_norm")
        self.qkv = weight("qkv")
        self.out = weight("out")
        self.mlp_norm = weight("mlp_norm")
        self.gate_up = weight("gate_up")
        self.down = weight("down")

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, attend: Callable[[Tensor], Tensor], tp: TensorParallel
    ) -> Tensor:
        """Apply the layer. x: [T, H] -> [T, H]; cos, sin: [T, rotated heads, D]

        With sequence parallelism a rank holds a part of the rows of x.
        """

        def entering(weight: nn.Parameter, norm: nn.Parameter) -> Tensor:
            return linear(tp.enter(rms_norm(x, norm, self.eps)), weight)

        # What is computed on the way has no name, which would keep it in memory until the end.
        x = x + tp.leave(linear(attend(rotate(entering(self.qkv, self.attention_norm), cos, sin)), self.out))
        return x + tp.leave(linear(swiglu(entering(self.gate_up, self.mlp_norm)), self.down))


class Transformer(nn.Module):
    """Decoder, or one rank's shard of it, whose parameters are views of storage owned by others.

    `weights(*names)` returns the view over these canonical tensors as the rank stores them, stacked by rows.
    `sources` maps each parameter's name to the canonical tensors it is made of. `tensor_group` are the ranks
    that hold the other tensor-parallel shards of this stage.
    """

    def __init__(self, shard: Shard, weights: Callable[..., Tensor], tensor_group: Group) -> None:
        super().__init__()
        shape = shard.shape
        self.shard, self.shape, self.tensor_group = shard, shape, tensor_group
        self.sources: dict[str, tuple[str, ...]] = {}

        def parameter(name: str, *tensors: str) -> nn.Parameter:
            self.sources[name] = tuple(f"{tensor}.weight" for tensor in tensors)
            return nn.Parameter(weights(*self.sources[name]))

        def layer(i: int) -> Layer:
            def of_layer(name: str) -> nn.Parameter:
                tensors = (f"model.layers.{i}.{tensor}" for tensor in LAYER_SOURCES[name])
                return parameter(f"layers.{i - shard.layers.start}.{name}", *tensors)

            return Layer(shape.norm_eps, of_layer)

        self.embedding: nn.Parameter | None = None
        tied = shard.last and shard.head == "lm" and shape.tied_embeddings
        if shard.first or tied:
            self.embedding = parameter("embedding", "model.embed_tokens")
        self.layers = nn.ModuleList(layer(i) for i in shard.layers)
        self.norm: nn.Parameter | None = None
        self.head: nn.Parameter | None = None
        if shard.last:
            self.norm = parameter("norm", "model.norm")
            if not tied:
                self.head = parameter("head", "lm_head" if shard.head == "lm" else "score")
        device = next(self.parameters()).device
        self.frequency = frequencies(shape).to(device)
        self._reads = None
        if shard.uneven_groups is not None:
            count, reads = len(shard.queries), torch.tensor(shard.uneven_groups)
            keys = count + reads
            self._reads = torch.cat([torch.arange(count), keys, keys + len(shard.keys)]).to(device)

    @property
    def cache_heads(self) -> int:
        """Key/value heads in a cache for this shard."""
        return len(self.shard.queries if self._reads is not None else self.shard.keys)

    def forward(
        self, x: Tensor, packing: Packing, *, sequence: bool = False, recompute: bool = False
    ) -> Tensor:
        """One stage over packed sequences. x: [T] tokens on the first stage, else what the stage before it
        returned. Returns [T, H], after the final norm on the last stage.

        With `sequence` parallelism, [T, H] between stages and before the head is ceil(T / tp) rows a rank.
        With `recompute` only the inputs of layers are kept for the backward pass, which computes each layer
        once more, communication of TP ranks included.
        """
        heads, keys = len(self.shard.queries), self.cache_heads

        def attend(_: int, qkv: Tensor) -> Tensor:
            return attention(self._grouped(qkv), packing, heads, keys)

        tp = TensorParallel(self.tensor_group, len(packing.positions), sequence)
        return self._run(x, packing.positions, attend, tp, recompute=recompute)

    def prefill(self, x: Tensor, packing: Packing, cache: KVCache) -> Tensor:
        """Run `forward` and fill the empty cache, one row per sequence."""
        heads, keys = len(self.shard.queries), self.cache_heads
        cache.start(packing)

        def attend(layer: int, qkv: Tensor) -> Tensor:
            qkv = self._grouped(qkv)
            _, k, v = split_heads(qkv, heads, keys)
            cache.store(layer, k, v, packing)
            return attention(qkv, packing, heads, keys)

        tp = TensorParallel(self.tensor_group, len(packing.positions))
        return self._run(x, packing.positions, attend, tp)

    def decode(self, x: Tensor, cache: KVCache) -> Tensor:
        """Decode the next token of every row of the cache.

        x: [B] tokens on the first stage, else [B, H] -> [B, H]
        """
        positions = cache.lengths
        visible = cache.grow()

        def attend(layer: int, qkv: Tensor) -> Tensor:
            q, k, v = split_heads(self._grouped(qkv), len(self.shard.queries), self.cache_heads)
            return decode_attention(q, *cache.append(layer, k, v), visible)

        return self._run(x, positions, attend, TensorParallel(self.tensor_group, len(x)))

    def _grouped(self, qkv: Tensor) -> Tensor:
        """Repeat key/value heads to one per query head where groups are uneven."""
        if self._reads is None:
            return qkv
        heads = qkv.view(len(qkv), -1, self.shape.head_dim)
        return heads.index_select(1, self._reads).view(len(qkv), -1)

    def _run(
        self, x: Tensor, positions: Tensor, attend: Attend, tp: TensorParallel, *, recompute: bool = False
    ) -> Tensor:
        if self.shard.first:
            x = tp.leave(self._embed(x))
        rotated = len(self.shard.queries) + len(self.shard.keys)
        cos, sin = rotary(positions, self.frequency, rotated, x.dtype)
        for i, layer in enumerate(self.layers):
            run = partial(layer, cos=cos, sin=sin, attend=partial(attend, i), tp=tp)
            x = recomputed(run, x) if recompute else run(x)
        return x if self.norm is None else rms_norm(x, self.norm, self.shape.norm_eps)

    def _embed(self, tokens: Tensor) -> Tensor:
        """Embed tokens: [T] -> [T, H], zero where another TP rank has the token's row."""
        assert self.embedding is not None, "only the first stage embeds"
        if self.shard.tp == 1:
            return F.embedding(tokens, self.embedding)
        rows = self.shard.vocabulary
        elsewhere = (tokens < rows.start) | (tokens >= rows.stop)
        local = F.embedding((tokens - rows.start).masked_fill(elsewhere, 0), self.embedding)
        return local.masked_fill(elsewhere[:, None], 0.0)

    @property
    def _vocabulary(self) -> Tensor:
        """Slice this TP rank's rows of the head, without padding. [rows, H]"""
        assert self.shard.head == "lm" and self.shard.last, (
            "only a language model's last stage has a vocabulary"
        )
        table = self.embedding if self.head is None else self.head
        assert table is not None, "a tied head is an embedding"
        return table[: len(self.shard.vocabulary)]

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute unscaled logits over the whole vocabulary, without gradient. hidden: [N, H] -> [N, V] float32"""
        local = product(hidden, self._vocabulary).float()
        if self.shard.tp == 1:
            return local
        return self.tensor_group.gather_columns(local, self.shape.vocab_size)

    def logprobs(
        self,
        hidden: Tensor,
        tokens: Tensor,
        packing: Packing,
        *,
        temperature: float,
        entropy: bool = False,
        sequence: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """log p(token t | tokens before it), 0 at the first token of each sequence, logits divided by
        `temperature`; and likewise the entropy of the distribution that token t is drawn from, in nats.

        hidden: [T, H] as `forward` returned it, tokens: [T] -> [T] float32, and [T] float32 without gradient
        or None; the same on every tensor rank.
        """
        index = packing.predicted
        tp = TensorParallel(self.tensor_group, len(tokens), sequence)
        before = tp.enter(hidden).index_select(0, index - 1)
        chosen, spread = token_logprobs(
            before,
            self._vocabulary,
            tokens[index] - self.shard.vocabulary.start,
            temperature=temperature,
            entropy=entropy,
            group=self.tensor_group,
            rows=padded_vocabulary(self.shape, self.shard.tp),
        )
        zeros = torch.zeros(len(tokens), dtype=torch.float32, device=hidden.device)
        full = zeros.index_copy(0, index, chosen)
        return full, None if spread is None else zeros.index_copy(0, index, spread)

    def values(self, hidden: Tensor, packing: Packing, *, sequence: bool = False) -> Tensor:
        """Compute the scalar head's output at every position, equal on every TP rank. [T, H] -> [T] float32"""
        assert self.shard.head == "scalar" and self.head is not None, "a language-model head has no values"
        tp = TensorParallel(self.tensor_group, len(packing.positions), sequence)
        return (tp.whole(hidden).float() @ self.head.float().T).squeeze(-1)
