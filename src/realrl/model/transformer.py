"""Decoder with one code path for training, inference and generation, whole or as one rank's shard."""

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Literal, cast

import torch
from torch import Tensor, nn

from realrl.families.adapters import LORA_A
from realrl.families.registry import find_layer_options, model_tensors
from realrl.families.tensors import Parameter, TensorSpec
from realrl.layout.shard import Shard
from realrl.model.adapter import Adapter, StackAdapter, make_adapters, make_stack_adapters
from realrl.model.arithmetic.autograd import checkpoint_activations
from realrl.model.arithmetic.ops import PLAIN, Products, embed, linear
from realrl.model.attention import find_repeated_heads, varlen_attention
from realrl.model.attention_rule import AttentionRule
from realrl.model.context_parallel import ContextParallel
from realrl.model.group import Group, make_single_rank_group
from realrl.model.kv_cache import PagedCache
from realrl.model.layer import Layer, Norm, RotaryTables
from realrl.model.logprobs import cap_logits, compute_token_logprobs, find_likeliest_tokens
from realrl.model.matrices import DecodeWeights, Matrices
from realrl.model.packing import Packing
from realrl.model.paged_attention import CachedRows
from realrl.model.prefill import Prefill
from realrl.model.quantised import find_matrices
from realrl.model.rotary import make_rotation
from realrl.model.routing import LIKELIEST, Routing
from realrl.model.tensor_parallel import TensorParallel

Section = int | Literal["embedding", "head"]
"""The embedding, a layer (by its number in the stage), or the final norm with the head. If embeddings are tied and
one stage has both embedding and head, the head also needs the embedding's parameters."""


class SectionHooks:
    """Hooks that a forward pass calls at the start and the end of each section. The hooks of this class do nothing.

    The head is entered with the hidden states before the final norm. `leave` is not called for the head, because
    its outputs are computed later (for example, by `compute_logprobs`).
    """

    def enter(self, section: Section, x: Tensor) -> Tensor:
        """Begin a section with input `x`, and return `x`."""
        return x

    def leave(self, section: Section, x: Tensor) -> Tensor:
        """End a section with output `x`, and return `x`."""
        return x


AttentionFunction = Callable[[int, Tensor, AttentionRule], Tensor]
"""Function (layer of the stage, rotated qkv [T, C], rule) -> attention output [T, query heads * D]."""


class Transformer(nn.Module):
    """Decoder, or one rank's shard of it. Its parameters are views of memory that other objects own.

    `weights(*names)` returns a view of the rank's rows of the global tensors with these names, stacked. `sources`
    maps each parameter's name to the global tensors that it is stacked from. `tensor_group` has the ranks with the
    tensor-parallel shards of this stage, and `expert_group` the ranks that divide its experts. `products`
    determines how matrices are multiplied.
    """

    def __init__(
        self,
        shard: Shard,
        weights: Callable[..., Tensor],
        tensor_group: Group,
        products: Products = PLAIN,
        *,
        expert_group: Group | None = None,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        shape = shard.shape
        self.shard = shard
        self.shape = shape
        self.tensor_group = tensor_group
        self._products = products
        self._sequence_parallel = sequence_parallel
        options = find_layer_options(shape)
        self.hooks = SectionHooks()
        self._norm = Norm(shape)
        self._logit_scale, self._logit_cap = options.logit_scale, options.logit_cap
        self.sources: dict[str, tuple[str, ...]] = {}
        tensors: defaultdict[tuple[int | None, Parameter], list[TensorSpec]] = defaultdict(list)
        for spec in model_tensors(shape, shard.head):
            if shard.holds(spec):
                tensors[spec.layer, spec.parameter].append(spec)

        def parameter(layer: int | None, parameter: Parameter) -> nn.Parameter | None:
            names = tuple(spec.name for spec in tensors[layer, parameter])
            if not names:
                return None
            name = parameter if layer is None else f"layers.{shard.layers.index(layer)}.{parameter}"
            self.sources[name] = names
            return nn.Parameter(found := weights(*names), requires_grad=found.is_floating_point())

        self.embedding = parameter(None, "embedding")
        self._embedding_scale = 1.0
        if self.embedding is not None:
            scale = shape.hidden_size**0.5 if options.embedding_scale == "root" else options.embedding_scale
            # The original code rounds the factor to the type of the embeddings.
            self._embedding_scale = torch.tensor(scale, dtype=self.embedding.dtype, device="cpu").item()
        self.positions = parameter(None, "positions")
        self.layers = nn.ModuleList(
            Layer(shard, i, partial(parameter, i), expert_group or make_single_rank_group())
            for i in shard.layers
        )
        numbered = [*zip(shard.layers, self.layers, strict=True)]
        self._adapters: dict[int, Adapter] = {}
        self._stack_adapters: dict[int, StackAdapter] = {}
        if shape.lora is not None:
            for number, layer in numbered:
                of_layer = {matrix: tensors[number, matrix] for matrix in LORA_A}
                self._adapters |= make_adapters(
                    layer, of_layer, shape.lora, weights, partial(parameter, number), products, tensor_group
                )
                self._stack_adapters |= make_stack_adapters(layer, shape.lora, partial(parameter, number))
        self._quantised = find_matrices(numbered, parameter, shape.quantised)
        self._matrices = Matrices(products, self._adapters, self._quantised, self._stack_adapters)
        self.norm = parameter(None, "norm")
        self.norm_bias = parameter(None, "norm_bias")
        self.lm_head = parameter(None, "lm_head")
        self.lm_head_bias = parameter(None, "lm_head_bias")
        self.scalar_head = parameter(None, "scalar_head")
        device = next(self.parameters()).device
        kinds = [shape.attention_kind(layer) for layer in shard.layers]
        self._kinds = [list(dict.fromkeys(kinds)).index(kind) for kind in kinds]
        firsts = [kinds.index(kind) for kind in dict.fromkeys(kinds)]
        rotations = [make_rotation(shape, shard.layers[first]) for first in firsts]
        self.rotations = [None if r is None else r.to(device) for r in rotations]
        self._kv_head_index = find_repeated_heads(shard, device)

    @torch.no_grad()
    def initialise_magnitudes(self, layer: int) -> None:
        """Set DoRA's magnitudes in a layer to the norms of the adapted rows; TP ranks call it together."""
        for matrix in cast(Layer, self.layers[layer]).matrices:
            adapter = self._adapters.get(id(matrix))
            if adapter is not None and adapter.magnitude is not None:
                adapter.magnitude.copy_(adapter.compute_norms())

    @property
    def ties_embeddings(self) -> bool:
        """Whether the head uses the embedding matrix of this stage."""
        return self.shard.first and self.shard.last and self.shard.head == "lm" and self.lm_head is None

    @property
    def cache_kv_heads(self) -> int:
        """Number of key/value heads in this shard's cache."""
        return len(self.shard.queries if self._kv_head_index is not None else self.shard.keys)

    def forward(
        self,
        x: Tensor,
        packing: Packing,
        *,
        recompute: bool = False,
        routing: Routing = LIKELIEST,
        virtual: int = 0,
    ) -> Tensor:
        """Run one virtual stage over packed sequences; returns [T, H], after the final norm on the last stage.

        x: [T] tokens on the first stage, otherwise the output of the stage before. Hidden states have one row for
        each token that this rank computes, which may be fewer than all (`packing.common`, `packing.share`); T is
        their number. With sequence parallelism, hidden states between stages and before the head have ceil(T / tp)
        rows per rank. With `recompute`, only the inputs of layers are kept; the backward pass computes each layer
        again, communication of TP and CP ranks included.
        `routing` chooses the experts of mixtures.
        """
        heads = len(self.shard.queries)
        kv_heads = self.cache_kv_heads

        cp = self._make_cp(packing)

        def attend(_: int, qkv: Tensor, rule: AttentionRule) -> Tensor:
            qkv, exact = self._repeat_kv_heads(qkv), self._products.exact
            if cp is not None:
                return cp.attend(qkv, heads, kv_heads, rule, exact=exact)
            return varlen_attention(qkv, packing, heads, kv_heads, rule, exact=exact)

        tp, positions = self._make_tp(packing), packing.positions
        positions = positions if cp is None else cp.share.positions
        x = packing.select(x) if self.shard.begins(virtual) else x
        return self._run_layers(
            x, positions, attend, tp, self._matrices, routing, recompute=recompute, virtual=virtual
        )

    def prefill(self, x: Tensor, tokens: Prefill, cache: PagedCache) -> Tensor | None:
        """Compute keys and values of tokens, and store them at their places in the cache.

        x: as for `forward`. Returns hidden states for the next stage [n, H]. The last stage returns None and stops
        after the last layer's keys and values, because nothing needs its output.
        """
        heads = len(self.shard.queries)
        kv_heads = self.cache_kv_heads
        width = heads * self.shape.head_dim
        exact = self._products.exact

        def store(layer: int, kv: Tensor) -> None:
            """Store the keys and values, side by side, of all tokens."""
            places = tokens.places
            if tokens.stored is not None:
                kv, places = kv[tokens.stored[0]], tokens.stored[1]
            k, v = kv.view(len(kv), 2, kv_heads, self.shape.head_dim).unbind(1)
            cache.store(layer, k, v, places)

        def attend(layer: int, qkv: Tensor, rule: AttentionRule) -> Tensor:
            qkv = self._repeat_kv_heads(qkv)
            of_whole, of_parts = tokens.split(qkv)
            # Parts of sequences read keys that this pass may store for other parts.
            if tokens.divided:
                kv, of_parts = tokens.gather_whole(of_whole[:, width:]), tokens.share.gather(of_parts)
                store(layer, tokens.join(kv, of_parts[:, width:]))
            else:
                kv = of_whole
                store(layer, qkv[:, width:])
            found = []
            if tokens.whole is not None and tokens.whole.share is not None:
                cp = ContextParallel(tokens.whole.share)
                found.append(cp.attend_to(of_whole[:, :width], kv, heads, kv_heads, rule, exact=exact))
            elif tokens.whole is not None:
                found.append(varlen_attention(of_whole, tokens.whole, heads, kv_heads, rule, exact=exact))
            if tokens.parts:
                found.append(cache.attend_to_parts(layer, of_parts, tokens.parts, heads, rule, tokens.share))
            return torch.cat(found) if len(found) > 1 else found[0]

        def collect_experts(experts: Tensor) -> Tensor:
            # Not every backend gathers 16-bit integers.
            return tokens.collect(experts.view(torch.uint8)).view(experts.dtype)

        record = None if cache.experts is None else cache.record(tokens.places, collect_experts)
        tp = TensorParallel(self.tensor_group, len(tokens.positions))
        x, tables = self._enter(x, tokens.positions, tp)
        count = len(self.layers) - self.shard.last
        for i, layer in enumerate(self.layers[:count]):
            x = layer(x, tables[i], partial(attend, i), tp, self._matrices, record or LIKELIEST)
        if not self.shard.last:
            return x
        last = cast(Layer, self.layers[count])
        kv = self._repeat_kv_heads(last.compute_qkv(x, tables[count], tp, self._matrices))[:, width:]
        store(count, tokens.collect(kv))
        if record is not None:
            record.skip(count)
        return None

    def prepare_decoding(self) -> DecodeWeights:
        """Make the matrices for decode steps, which are valid until parameters change."""
        layers = [cast(Layer, layer) for layer in self.layers]
        return DecodeWeights(
            [matrix for layer in layers for matrix in layer.matrices],
            self._head if self.shard.last else None,
            self._products,
            self._adapters,
            self._quantised,
            [stack for layer in layers for stack in layer.stacks],
            len(self.shard.experts),
            self._stack_adapters,
        )

    def decode(self, x: Tensor, weights: DecodeWeights, cache: PagedCache, rows: CachedRows) -> Tensor:
        """Decode one token of every row, and add its keys and values to the cache.

        x: [B] tokens on the first stage, otherwise [B, H] -> [B, H], after the final norm on the last stage
        """
        heads = len(self.shard.queries)

        def attend(layer: int, qkv: Tensor, rule: AttentionRule) -> Tensor:
            qkv = self._repeat_kv_heads(qkv)
            return cache.attend(layer, qkv, rows, heads, rule, exact=self._products.exact)

        positions = rows.prompt_lengths + rows.own_lengths
        tp = TensorParallel(self.tensor_group, len(x))
        routing = LIKELIEST if cache.experts is None else cache.record(rows.newest)
        return self._run_layers(x, positions, attend, tp, weights, routing)

    def _make_tp(self, packing: Packing) -> TensorParallel:
        """Make the TP communication for training and inference. Prefill and decode steps make their own, because
        they never use sequence parallelism."""
        tokens = len(packing.positions) if packing.share is None else packing.share.count
        return TensorParallel(self.tensor_group, tokens, self._sequence_parallel)

    def _make_cp(self, packing: Packing) -> ContextParallel | None:
        """Make the CP communication; None if no ranks divide the tokens."""
        return None if packing.share is None else ContextParallel(packing.share)

    def _repeat_kv_heads(self, qkv: Tensor) -> Tensor:
        """Repeat key/value heads to one per query head, if key heads serve different numbers of query heads."""
        if self._kv_head_index is None:
            return qkv
        heads = qkv.view(len(qkv), -1, self.shape.head_dim)
        return heads.index_select(1, self._kv_head_index).view(len(qkv), -1)

    def _run_layers(
        self,
        x: Tensor,
        positions: Tensor,
        attend: AttentionFunction,
        tp: TensorParallel,
        matrices: Matrices,
        routing: Routing,
        *,
        recompute: bool = False,
        virtual: int = 0,
    ) -> Tensor:
        x, tables = self._enter(x, positions, tp, virtual)
        for i in self.shard.places(virtual):
            layer = self.layers[i]
            if recompute and not x.requires_grad and any(p.requires_grad for p in layer.parameters()):
                # Everything before this layer is frozen, but checkpointing computes gradients only if its
                # input requires one.
                x = x.detach().requires_grad_(True)
            x = self.hooks.enter(i, x)
            run_layer = partial(
                layer, tables=tables[i], attend=partial(attend, i), tp=tp, matrices=matrices, routing=routing
            )
            x = self.hooks.leave(i, checkpoint_activations(run_layer, x) if recompute else run_layer(x))
        if not self.shard.ends(virtual):
            return x
        assert self.norm is not None, "the last stage has the final norm"
        return self._norm.normalize(self.hooks.enter("head", x), self.norm, self.norm_bias)

    def _enter(
        self, x: Tensor, positions: Tensor, tp: TensorParallel, virtual: int = 0
    ) -> tuple[Tensor, list[RotaryTables]]:
        """Compute the input of the first layer, and each layer's cosines and sines."""
        if self.shard.begins(virtual):
            x = tp.reduce_from_region(self._embed(self.hooks.enter("embedding", x)))
            if self._embedding_scale != 1:
                x = x * self._embedding_scale
            if self.positions is not None:
                x = x + embed(tp.own_rows(positions), self.positions)
            x = self.hooks.leave("embedding", x)
        found = [None if rotation is None else rotation.tables(positions) for rotation in self.rotations]
        return x, [found[kind] for kind in self._kinds]

    def _embed(self, tokens: Tensor) -> Tensor:
        """Embed tokens; rows are zero if another TP rank has the token. [T] -> [T, H]"""
        assert self.embedding is not None, "only the first stage embeds"
        if self.shard.tp == 1:
            return embed(tokens, self.embedding)
        rows = self.shard.vocabulary
        on_other_rank = (tokens < rows.start) | (tokens >= rows.stop)
        local = embed((tokens - rows.start).masked_fill(on_other_rank, 0), self.embedding)
        return local.masked_fill(on_other_rank[:, None], 0.0)

    @property
    def _table(self) -> Tensor:
        """The head's matrix: this TP rank's rows of the vocabulary, then padding. [P, H]"""
        assert self.shard.head == "lm" and self.shard.last, (
            "only a language model's last stage has a vocabulary"
        )
        table = self.embedding if self.lm_head is None else self.lm_head
        assert table is not None, "a tied head is an embedding"
        return table

    @property
    def _head(self) -> Tensor:
        """The head's matrix without padding. [rows, H]"""
        return self._table[: len(self.shard.vocabulary)]

    def compute_logits(self, hidden: Tensor, weights: DecodeWeights | None = None) -> Tensor:
        """Compute logits over the whole vocabulary, at temperature 1 and without gradient. hidden: [N, H] -> [N, V]
        float32

        `weights` are the matrices of decode steps, which may hold a packed copy of the head.
        """
        hidden = self._scale(hidden)
        if weights is not None:
            local = weights.multiply_by_head(hidden)
        else:
            local = self._products.matmul_nt_float32(hidden, self._head)
        if self.lm_head_bias is not None:
            local += self.lm_head_bias[: local.shape[1]]
        if self._logit_cap is not None:
            cap_logits(local, self._logit_cap)
        if self.shard.tp == 1:
            return local
        return self.tensor_group.gather_columns(local, self.shape.vocab_size)

    def compute_logprobs(
        self,
        hidden: Tensor,
        tokens: Tensor,
        packing: Packing,
        *,
        temperature: float,
        entropy: bool = False,
        candidates: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Compute log p(token t | earlier tokens), and the log-probability of each candidate at its position.

        With `entropy`, also the entropy of that distribution in nats. Logits are divided by `temperature`. Results
        are 0 at the first token of each sequence, and equal on every TP rank.

        hidden: as returned by `forward`; tokens: [T]; candidates: [T, k] or None -> [T] float32, entropies
        [T] float32 without gradient or None, candidates' log-probabilities [T, k] float32 or None
        """
        assert candidates is None or packing.common is None, "each sequence has candidates of its own"
        targets, predicting, wanted = self._predict(hidden, tokens, packing)
        if candidates is not None:
            wanted = torch.cat([wanted, candidates[targets]], 1)
        logprobs, entropies = compute_token_logprobs(
            predicting,
            self._table,
            wanted.sub_(self.shard.vocabulary.start),
            bias=self.lm_head_bias,
            cap=self._logit_cap,
            temperature=temperature,
            entropy=entropy,
            group=self.tensor_group,
            rows=len(self.shard.vocabulary),
            products=self._products,
        )
        full = self._combine(logprobs[:, 0], targets, packing)
        entropies = None if entropies is None else self._combine(entropies, targets, packing)
        if candidates is None:
            return full, entropies, None
        return full, entropies, self._combine(logprobs[:, 1:], targets, packing)

    def find_likeliest(
        self, hidden: Tensor, tokens: Tensor, packing: Packing, *, count: int, temperature: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the log-probabilities of tokens, and the `count` likeliest tokens at each position.

        Arguments as for `compute_logprobs`, without gradient. -> [T] float32, [T, count] int64 tokens, [T, count]
        float32; 0 at the first token of each sequence, and equal on every TP rank
        """
        targets, predicting, wanted = self._predict(hidden, tokens, packing)
        logprobs, likeliest, best = find_likeliest_tokens(
            predicting,
            self._table,
            wanted.sub_(self.shard.vocabulary.start),
            count=count,
            bias=self.lm_head_bias,
            cap=self._logit_cap,
            temperature=temperature,
            group=self.tensor_group,
            rows=len(self.shard.vocabulary),
            first=self.shard.vocabulary.start,
            products=self._products,
        )
        full = self._combine(logprobs[:, 0], targets, packing)
        ids = self._combine(likeliest, targets, packing)
        return full, ids, self._combine(best, targets, packing)

    def _combine(self, values: Tensor, places: Tensor, packing: Packing) -> Tensor:
        """Put the values of some packed places, which CP ranks may divide, into a tensor of all places. [N, ...] ->
        [T, ...], 0 elsewhere"""
        cp = self._make_cp(packing)
        if cp is not None:
            return cp.combine(values, places)
        found = values.new_zeros(len(packing.positions), *values.shape[1:]).index_copy_(0, places, values)
        return found if packing.common is None else packing.common.whole.copy(found)

    def _predict(self, hidden: Tensor, tokens: Tensor, packing: Packing) -> tuple[Tensor, Tensor, Tensor]:
        """Select the N predicted positions, the hidden states that predict them, and the tokens at these positions.
        If CP ranks divide the tokens, these are the tokens that this rank's tokens predict.

        -> [N], [N, H], [N, 1]
        """
        hidden = self._make_tp(packing).copy_to_region(hidden)
        # Position t - 1 predicts token t.
        if packing.share is not None:
            targets, predicting = packing.share.targets, hidden.index_select(0, packing.share.predicting)
        elif packing.common is not None:
            targets, predicting = packing.target_indices, packing.common.predicting.copy(hidden)
            tokens = packing.select(tokens)
        else:
            targets = packing.target_indices
            predicting = hidden.index_select(0, targets - 1)
        return targets, self._scale(predicting), tokens[targets, None]

    def _scale(self, hidden: Tensor) -> Tensor:
        """Multiply hidden states by the factor of the logits. All ways to compute logits use it, so their results
        agree bit for bit."""
        return hidden if self._logit_scale == 1 else hidden * self._logit_scale

    def compute_values(self, hidden: Tensor, packing: Packing) -> Tensor:
        """Compute the scalar head's output at every position, equal on every TP and CP rank. hidden: as returned by
        `forward` -> [T] float32"""
        assert self.scalar_head is not None, "only the last stage of a model with a scalar head has values"
        # Values are always computed in float32, because they are trained by regression.
        hidden = self._make_tp(packing).gather_from_region(hidden).float()
        if self._products.exact:
            values = linear(hidden, self.scalar_head, products=Products(exact=True)).squeeze(-1)
        else:
            values = (hidden @ self.scalar_head.float().T).squeeze(-1)
        if packing.share is None:
            return values if packing.common is None else packing.common.whole.copy(values)
        real = packing.share.real
        return self._combine(
            values.index_select(0, real), packing.share.places.index_select(0, real), packing
        )
