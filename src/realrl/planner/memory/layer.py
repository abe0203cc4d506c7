"""Activation memory of one layer on one rank.

Counted are the tensors that `model.transformer` and `model.attention` allocate, and those that operations with a
gradient save. Unless stated otherwise, sizes are elements per token in the model's type.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, reduce

import numpy as np

from realrl.layout import limits
from realrl.layout.limits import ADDED_ELEMENTS, bucket_lengths
from realrl.planner.workload.shard_sizes import LocalSizes
from realrl.planner.workload.strategies import Strategies
from realrl.program.arrays import Floats, Ints, Real, truncate


def added_bytes(elements: int, element_bytes: int) -> int:
    """Compute the bytes of a matrix's gradient apart from the float32 gradients that it is added to.

    float32 products add to them. Those of narrow numbers are computed part by part, and widened before.
    """
    return min(elements, ADDED_ELEMENTS) * (element_bytes + 4) if element_bytes < 4 else 0


@dataclass(frozen=True, kw_only=True)
class LayerMemory:
    """Activation sizes of a layer.

    `lengths` are samples of sequence lengths, `sample` that of each strategy; they matter where attention pads
    sequences: on a GPU in float32, and where layers have a cap or sinks.
    """

    sizes: LocalSizes
    strategies: Strategies
    element_bytes: int
    cpu: bool
    lengths: Sequence[tuple[int, ...]]
    sample: Ints

    @cached_property
    def hidden(self) -> int:
        """Hidden size."""
        return self.sizes.shape.hidden_size

    @cached_property
    def stream(self) -> float:
        """Elements of the residual stream per token, which sequence parallelism shards."""
        return self.hidden / (self.sizes.tp if self.strategies.sequence_parallel else 1)

    def rotation_bytes(self, tokens: Real) -> Ints:
        """Compute the bytes of the rotary tables, shared by all layers: cosines and sines of pairs in float32."""
        return truncate(tokens * 4 * self.sizes.shape.head_dim)

    def index_bytes(self, tokens: Real) -> Ints:
        """Compute the bytes of int64 indices to padded heads and back, shared by all layers."""
        if not self._pads:
            return truncate(0)
        heads = 2 * (self.sizes.q_dim + self.sizes.cache_dim) / self.sizes.shape.head_dim
        return truncate(8 * heads * (self._padded_rows + 1) * tokens)

    @cached_property
    def computed(self) -> Real:
        """Peak elements per token without gradients: in attention or in the feed-forward block.

        Attention holds the residual stream, queries, keys and values, and its output. On a CPU it also holds a
        log-sum-exp per head, and copies of what it reads and computes in float32 where that is not their type.
        Where it pads, it also holds padded copies of queries, keys and values, keys and values once more for every
        query head, and three padded outputs. The feed-forward block holds the stream before and after attention,
        and gate, up and their product, or the tensors that these are computed from or projected to, normalised
        or with a bias; of a mixture, see `_computed_experts`. Norms of heads hold the stream, queries, keys and
        values, and the normalised ones before and after they are put together.
        """
        s = self.stream
        inner, gate_up = self.sizes.ffn_dim, self.sizes.gate_up_dim
        queries = self.sizes.q_dim
        attention: Real = s + self._qkv + max(queries, self.hidden + self._added(self._qkv))
        if self.sizes.cache_dim != self.sizes.kv_dim:
            attention += self._read
        if self.cpu:
            attention += self._float32 * self._heads + self._widened(self._read + queries)
        if self._pads:
            attention += self._padded_rows * (self._read + 5 * queries)
        entering = self.hidden + (s if self.strategies.sequence_parallel else 0)
        up = gate_up + self._added(self.sizes.gate_up_dim)
        block = max(
            entering + up, gate_up + inner, inner + self.hidden + self._added(self.hidden), 2 * self.hidden
        )
        if self.sizes.experts:
            # What experts give is held beside a shared block.
            shared = max(block, 2 * self.hidden) + self.hidden if self.sizes.shared_blocks else 0
            block = max(entering + self._computed_experts, shared)
        joined = 2 * self._qkv + self.sizes.q_dim + self.sizes.kv_dim if self.sizes.qk_norm else 0
        return np.maximum(attention, max(s + joined, 2 * s + block))

    @cached_property
    def kept(self) -> Real:
        """Elements per token saved for the backward pass.

        These are inputs of the two norms, their outputs and their scales in float32; queries, keys and values as
        attention reads them; its output; gate, up and their product. Attention also saves a log-sum-exp per head in
        float32. Where it pads, it saves what it reads and computes in padded copies, keys and values once more for
        every query head. Norms of heads save what they normalise, and a scale for each head in float32.
        """
        norms = 2 * self.hidden + self._normed_blocks * (self.stream + self._norm_scales)
        if self.sizes.qk_norm:
            heads = (self.sizes.q_dim + self.sizes.kv_dim) / self.sizes.shape.head_dim
            norms += self._qkv + heads * self._float32
        sums = self._heads * self._float32
        attention: Real
        if self._pads:
            # Where scores are computed in memory, the output and its sums are not kept.
            results = 0 if self.sizes.options.scores_in_memory else self.sizes.q_dim + sums
            attention = self._padded_rows * (self._read + 2 * self.sizes.q_dim + results) + self.sizes.q_dim
        else:
            attention = self._read + self.sizes.q_dim + sums
        return norms + attention + self._kept_block + self._kept_adapters

    @property
    def _kept_block(self) -> float:
        """Elements per token that feed-forward blocks keep: gate, up and their product.

        An expert also keeps that product times the weight of the expert, or its input times the weight. A mixture
        keeps its probabilities.
        """
        if not self.sizes.experts:
            return self._kept_shared
        weighed = self.hidden if self.sizes.weighs_inputs else self.sizes.ffn_dim
        rows = self.sizes.copies * (self.sizes.gate_up_dim + self.sizes.ffn_dim + weighed)
        return rows + self._probabilities + self._choices + self._kept_shared

    @property
    def _kept_shared(self) -> int:
        """Elements per token that a feed-forward block keeps that all tokens pass through."""
        return self.sizes.shared_blocks * (self.sizes.gate_up_dim + self.sizes.ffn_dim)

    @property
    def _computed_experts(self) -> float:
        """Peak elements per token that a mixture computes without gradients, besides its input.

        A token has a row for each of its experts: its own copies and gate and up, these and their product, and the
        outputs of the experts, in the order of tokens and added up; that product times a weight, and the outputs
        beside what they are computed from, are never the most. On a CPU the products of an expert come apart before
        they are put beside others.
        """
        inner, gate_up = self.sizes.ffn_dim, self.sizes.gate_up_dim
        k = self.sizes.copies
        apart = k / self.sizes.experts if self.cpu else 0
        rows = max(
            k * (self.hidden + gate_up) + apart * gate_up,
            k * (gate_up + inner),
            (2 * k + 1) * self.hidden,
        )
        return rows + self._probabilities + self._choices

    @property
    def _probabilities(self) -> float:
        """Elements that the float32 probabilities of a token's experts take; sigmoids are float64 numbers first."""
        mixture = self.sizes.shape.mixture
        sigmoid = mixture is not None and mixture.scores == "sigmoid"
        return self.sizes.experts * self._float32 * (3 if sigmoid else 1)

    @property
    def _choices(self) -> float:
        """Elements that the choice of a token's experts takes.

        These are their numbers, places, order and tokens in int64, and two float32 weights.
        """
        return self.sizes.copies * (4 * 8 / self.element_bytes + 2 * self._float32)

    @property
    def _kept_adapters(self) -> int:
        """Elements per token between the two products of adapters, and DoRA's products before they are scaled."""
        return sum(adapter.inner + adapter.rows * adapter.dora for adapter in self.sizes.adapters)

    def _added(self, outputs: int) -> int:
        """Elements per token of the largest block that adapters add to a product with so many outputs.

        With DoRA, of what the sum is scaled to as well.
        """
        adapters = [a for a in self.sizes.adapters if a.rows <= outputs]
        return max((outputs if a.dora else max(a.blocks) for a in adapters), default=0)

    @property
    def _normed_blocks(self) -> int:
        """Rows of the stream, or of what is added to it, that norms keep to differentiate."""
        return 4 if self.sizes.options.norm_place == "around" else 2

    @property
    def _norm_scales(self) -> float:
        """Numbers that a norm keeps of a row; LayerNorm its mean, too."""
        return self._float32 * (2 if self.sizes.options.norm == "layer" else 1)

    @property
    def projected(self) -> float:
        """Elements per token of a layer that ends with keys and values: its input, that normalized, and these."""
        return self.stream + self.hidden + self._qkv

    def backward_bytes(self, tokens: Real) -> Ints:
        """Compute the peak bytes of gradients in backward, less saved tensors that have been freed by then."""
        s = self.stream
        hidden = self.hidden
        inner, gate_up = self.sizes.ffn_dim, self.sizes.gate_up_dim
        # On a GPU, gates but that of SwiGLU are differentiated one operation after the other.
        options = self.sizes.options
        apart = options.gated and options.activation != "silu" and not self.cpu
        between = 2 * inner if apart else 0
        frozen = self.sizes.frozen_matrices
        gathered = hidden if self.strategies.sequence_parallel else 0
        # oneDNN copies an operand of the matmul for the weight gradient; adapters give a second gradient of inputs.
        copied = hidden if self.cpu or frozen else 0

        moments = [
            # The gradients of the product, of gate and up; the product itself has been freed.
            self.bytes(tokens, s + gate_up + between),
            # The gradients of a matrix and of its input, when saved tensors of later operations are freed.
            self.bytes(tokens, s + gathered + copied + inner) + self._added_bytes(inner * hidden),
            self.bytes(tokens, s + hidden + copied - inner) + self._added_bytes(gate_up * hidden),
        ]
        if self.sizes.experts:
            routed = self._expert_moments(tokens)
            if self.sizes.shared_blocks:
                # It is differentiated first: the gradient of what it reads is held, what it saved has been freed.
                held, after = self.bytes(tokens, gathered), self.bytes(tokens, hidden - self._kept_shared)
                moments = [*(moment + held for moment in moments), *(moment + after for moment in routed)]
            else:
                moments = routed
        queries = self.sizes.q_dim
        attention: Real
        if self._pads:
            # The gradients of padded outputs, queries, and keys and values for every query head, and the product of
            # outputs with their gradients; in bfloat16 those of keys and values are float32 numbers first.
            widened = self._widened(3 * queries) if self.sizes.options.scores_in_memory else 0
            attention = self._padded_rows * (5 * queries + widened) - queries
        else:
            attention = queries + self._read
            if self.cpu:
                attention += self._widened(2 * self._read + 2 * queries)
        # What the feed-forward block saved, which is done, has been freed.
        scores = self.score_bytes(tokens, backward=True)
        moments.append(self.bytes(tokens, attention - self._kept_block - hidden) + scores)
        return reduce(np.maximum, moments)

    def _expert_moments(self, tokens: Real) -> list[Ints]:
        """Compute the bytes of gradients at moments of a mixture's backward pass, less what has been freed by then.

        The rows of an expert are gathered once more for the gradients of its matrices.
        """
        inner, gate_up, hidden = self.sizes.ffn_dim, self.sizes.gate_up_dim, self.hidden
        gathered = hidden if self.strategies.sequence_parallel else 0
        k = self.sizes.copies
        moments = [
            # At the end of the forward pass, what experts give, in their order and in that of tokens.
            self.bytes(tokens, 2 * k * hidden),
            # The gradients of what experts give, and of the products that are their inputs.
            self.bytes(tokens, self.stream + k * (hidden + inner)) + self._added_bytes(inner * hidden),
            # Those of the products, and of gate and up; what the last product read has been freed.
            self.bytes(tokens, self.stream + k * gate_up),
        ]
        entering = self.stream + gathered
        if self.sizes.weighs_inputs:
            return [
                *moments,
                # Those of gate and up, and of their inputs, which have been kept.
                self.bytes(tokens, entering + k * (hidden - inner)) + self._added_bytes(gate_up * hidden),
                # Those of their inputs, times weights, and in the order of tokens; all else has been freed.
                self.bytes(tokens, entering + k * (2 * hidden - gate_up - inner)),
            ]
        return [
            *moments,
            # Those of gate and up, and their inputs, which are gathered, or added up; all else has been freed.
            self.bytes(tokens, entering + k * (hidden - 2 * inner)) + self._added_bytes(gate_up * hidden),
            self.bytes(tokens, entering + k * (2 * hidden - 2 * inner)),
        ]

    def _added_bytes(self, elements: int) -> int:
        """Compute the bytes of a gradient beside the one that it is added to. Of frozen matrices, adapters alone,
        which are small, have gradients."""
        added = self.cpu and not self.sizes.frozen_matrices
        return added_bytes(elements, self.element_bytes) if added else 0

    def forward_bytes(self, tokens: Real, held: Real = 0.0) -> Ints:
        """Compute the peak bytes without gradients, with `held` elements per token besides."""
        return self.bytes(tokens, held + self.computed) + self.score_bytes(tokens, backward=False)

    def score_bytes(self, tokens: Real, *, backward: bool) -> Ints:
        """Compute the bytes of attention's scores where they are computed in memory, some queries at a time.

        Forward they are float32, and cast to the model's type. Backward there are the weights, the slope of the
        cap, the gradient, and its product with the weights.
        """
        options, float32 = self.sizes.options, self.element_bytes == 4
        if self.cpu or not (options.scores_in_memory or (float32 and self.sizes.shape.windowed_layers)):
            return truncate(0)
        longest = np.array([max(lengths) for lengths in self.lengths])[self.sample]
        most = tokens * self._padded_rows * longest * self._heads
        copies = 3 + (options.attention_cap is not None) if backward else 1
        return truncate(
            np.minimum(most, limits.GPU_SCORES) * (4 * copies + (0 if float32 else self.element_bytes))
        )

    def bytes(self, tokens: Real, numbers: Real) -> Ints:
        """Compute the bytes of `numbers` elements per token."""
        return truncate(tokens * numbers * self.element_bytes)

    @cached_property
    def _padded_rows(self) -> Floats:
        """Tokens with attention's padding, per token."""
        return np.array([_count_padded(lengths) for lengths in self.lengths])[self.sample]

    @property
    def _pads(self) -> bool:
        """Whether attention pads sequences into a dense batch."""
        return not self.cpu and (self.element_bytes == 4 or self.sizes.options.scores_in_memory)

    def _widened(self, numbers: Real) -> Real:
        """Elements that float32 copies of so many elements take; none where they are float32."""
        return numbers * self._float32 if self.element_bytes < 4 else 0

    @property
    def _heads(self) -> float:
        return self.sizes.q_dim / self.sizes.shape.head_dim

    @property
    def _qkv(self) -> int:
        """Queries, keys and values as they are computed."""
        return self.sizes.q_dim + 2 * self.sizes.kv_dim

    @property
    def _read(self) -> int:
        """Elements of queries, keys and values as attention reads them; uneven groups expand keys to every
        query."""
        return self.sizes.q_dim + 2 * self.sizes.cache_dim

    @property
    def _float32(self) -> float:
        return 4 / self.element_bytes


@lru_cache(maxsize=4096)
def _count_padded(lengths: tuple[int, ...]) -> float:
    """Tokens of a batch with attention's padding, per token."""
    return sum(bucket.tokens for bucket in bucket_lengths(lengths)) / sum(lengths)
