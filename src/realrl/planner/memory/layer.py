"""Activation memory of one layer on one rank.

Counted are the tensors that `model.transformer` and `model.attention` allocate, and those that operations with a
gradient save. Unless stated otherwise, sizes are elements per token in the model's type.
"""

from dataclasses import dataclass
from functools import cached_property

from realrl.layout.padding import bucket_lengths
from realrl.plan.placement import Strategy
from realrl.planner.memory.matrix_gradients import added_bytes
from realrl.planner.workload.shard_sizes import LocalSizes


@dataclass(frozen=True, kw_only=True)
class LayerMemory:
    """Activation sizes of a layer.

    `lengths` are a sample of sequence lengths; they matter where attention pads sequences, on a GPU in float32.
    """

    sizes: LocalSizes
    strategy: Strategy
    element_bytes: int
    cpu: bool
    lengths: tuple[int, ...]

    @cached_property
    def hidden(self) -> int:
        """Hidden size."""
        return self.sizes.shape.hidden_size

    @cached_property
    def stream(self) -> float:
        """Elements of the residual stream per token, which sequence parallelism shards."""
        return self.hidden / (self.sizes.tp if self.strategy.sequence_parallel else 1)

    def rotation_bytes(self, tokens: float) -> int:
        """Compute the bytes of the rotary tables, shared by all layers: cosines and sines of pairs in float32."""
        return int(tokens * 4 * self.sizes.shape.head_dim)

    def index_bytes(self, tokens: float) -> int:
        """Compute the bytes of int64 indices to padded heads and back, shared by all layers."""
        if not self._pads:
            return 0
        heads = 2 * (self.sizes.q_dim + self.sizes.cache_dim) / self.sizes.shape.head_dim
        return int(8 * heads * (self._padded_rows + 1) * tokens)

    @cached_property
    def computed(self) -> float:
        """Peak elements per token without gradients: in attention or in the feed-forward block.

        Attention holds the residual stream, queries, keys and values, and its output. On a CPU it also holds a
        log-sum-exp per head, and copies of what it reads and computes in float32 where that is not their type.
        Where it pads, it also holds padded copies of queries, keys and values, keys and values once more for every
        query head, and three padded outputs. The feed-forward block holds the stream before and after attention,
        and gate, up and their product, or the tensors that these are computed from or projected to, normalised
        or with a bias. Norms of heads hold the stream, queries, keys and values, and the normalised ones before and
        after they are put together.
        """
        s = self.stream
        inner, gate_up = self.sizes.ffn_dim, self.sizes.gate_up_dim
        queries = self.sizes.q_dim
        attention = s + self._qkv + queries
        if self.sizes.cache_dim != self.sizes.kv_dim:
            attention += self._read
        if self.cpu:
            attention += self._float32 * self._heads + self._widened(self._read + queries)
        if self._pads:
            attention += self._padded_rows * (self._read + 5 * queries)
        entering = self.hidden + (s if self.strategy.sequence_parallel else 0)
        block = max(entering + gate_up, gate_up + inner, inner + self.hidden, 2 * self.hidden)
        joined = 2 * self._qkv + self.sizes.q_dim + self.sizes.kv_dim if self.sizes.qk_norm else 0
        return max(s + joined, attention, 2 * s + block)

    @cached_property
    def kept(self) -> float:
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
        if self._pads:
            attention = self._padded_rows * (self._read + 3 * self.sizes.q_dim + sums) + self.sizes.q_dim
        else:
            attention = self._read + self.sizes.q_dim + sums
        return norms + attention + self.sizes.gate_up_dim + self.sizes.ffn_dim

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

    def backward_bytes(self, tokens: float) -> int:
        """Compute the peak bytes of gradients in backward, less saved tensors that have been freed by then."""
        s = self.stream
        hidden = self.hidden
        inner, gate_up = self.sizes.ffn_dim, self.sizes.gate_up_dim
        # On a GPU, gates but that of SwiGLU are differentiated one operation after the other.
        options = self.sizes.options
        apart = options.gated and options.activation != "silu" and not self.cpu
        between = 2 * inner if apart else 0
        gathered = hidden if self.strategy.sequence_parallel else 0
        copied = hidden if self.cpu else 0  # oneDNN copies an operand of the matmul for the weight gradient

        def added(elements: int) -> int:
            return added_bytes(elements, self.element_bytes) if self.cpu else 0

        moments = [
            # The gradients of the product, of gate and up; the product itself has been freed.
            self.bytes(tokens, s + gate_up + between),
            # The gradients of a matrix and of its input, when saved tensors of later operations are freed.
            self.bytes(tokens, s + gathered + copied + inner) + added(inner * hidden),
            self.bytes(tokens, s + hidden + copied - inner) + added(gate_up * hidden),
        ]
        queries = self.sizes.q_dim
        if self._pads:
            # The gradients of padded outputs, queries, and keys and values for every query head, and the product of
            # outputs with their gradients.
            attention = self._padded_rows * 5 * queries - queries
        else:
            attention = queries + self._read
            if self.cpu:
                attention += self._widened(2 * self._read + 2 * queries)
        # What the feed-forward block saved, which is done, has been freed.
        moments.append(self.bytes(tokens, attention - gate_up - inner - hidden))
        return max(moments)

    def bytes(self, tokens: float, numbers: float) -> int:
        """Compute the bytes of `numbers` elements per token."""
        return int(tokens * numbers * self.element_bytes)

    @cached_property
    def _padded_rows(self) -> float:
        """Tokens with attention's padding, per token."""
        return sum(bucket.tokens for bucket in bucket_lengths(self.lengths)) / sum(self.lengths)

    @property
    def _pads(self) -> bool:
        """Whether attention pads sequences into a dense batch."""
        return not self.cpu and self.element_bytes == 4

    def _widened(self, numbers: float) -> float:
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
