"""Bytes of what one layer computes, on one rank.

Counted are the tensors that `model.transformer` and `model.attention` allocate, and those that operations with a
gradient save. Where nothing else is said, sizes are numbers per token in the model's type.
"""

from dataclasses import dataclass
from functools import cached_property

from realrl.plan.placement import Strategy
from realrl.planner.workload.padding import Padding
from realrl.planner.workload.sizes import LocalSizes


@dataclass(frozen=True)
class Layer:
    """Activations of a layer. `lengths` are a sample of the sequences' lengths, which count where attention pads
    sequences: on a CPU, and in float32."""

    sizes: LocalSizes
    strategy: Strategy
    element_bytes: int
    cpu: bool
    lengths: tuple[int, ...]

    @property
    def hidden(self) -> int:
        """Hidden states of all tokens."""
        return self.sizes.shape.hidden_size

    @property
    def stream(self) -> float:
        """Hidden states between layers, which sequence parallelism divides."""
        return self.hidden / (self.sizes.tp if self.strategy.sequence_parallel else 1)

    def rotation_bytes(self, tokens: float) -> int:
        """Bytes of sines and cosines, once for all layers; on a CPU for each head."""
        dims = self.sizes.queries + self.sizes.keys if self.cpu else self.sizes.shape.head_dim
        return self.bytes(tokens, 2 * dims)

    def index_bytes(self, tokens: float) -> int:
        """Bytes of the way to padded heads and back, once for all layers: twice two 8-byte numbers a head; and of
        masks, for the query heads that share a key."""
        if not self._pads:
            return 0
        heads = (self.sizes.queries + self.sizes.cached) / self.sizes.shape.head_dim
        return int(4 * 8 * heads * tokens + 4 * self._padding.masks * self.sizes.queries / self.sizes.cached)

    @cached_property
    def computed(self) -> float:
        """Most there is at a time without gradients: at attention or in the feed-forward block.

        At attention there are the stream, queries, keys and values, and the output; where it pads, the three once
        more, and for the output scores and their softmax, or two padded outputs and a packed one. In the block
        there are the stream before and after attention, and either gate, up and their product, or what those are
        computed from or turned into. Where heads are normalised there are the stream, queries, keys and values, and
        the normalised ones before and after they are put together.
        """
        s, inner, queries = self.stream, self.sizes.inner, self.sizes.queries
        attention = s + queries + 2 * self.sizes.keys
        if self.sizes.cached != self.sizes.keys:
            attention += self._read
        if self._pads:
            scores, output = self._heads * self._padding.scored_at_once, self._padding.rows * queries
            attention += self._padding.rows * self._read
            attention += max(2 * scores, scores + output, 2 * output + queries)
        else:
            attention += queries
        entering = self.hidden + (s if self.strategy.sequence_parallel else 0)
        block = max(entering + 2 * inner, 3 * inner, inner + self.hidden, 2 * self.hidden)
        joined = 2 * self._qkv + self.sizes.queries + self.sizes.keys if self.sizes.qk_norm else 0
        return max(s + joined, attention, 2 * s + block)

    @cached_property
    def kept(self) -> float:
        """Saved for the backward pass: inputs of the two norms, their outputs and their scales in float32; queries,
        keys and values as attention reads them; its output; gate, up and their product.

        Attention also saves a sum per head in float32, and where it pads its padded output, or scores instead of
        both. Norms of heads save what they normalise, and a scale for each head in float32.
        """
        norms = 2 * self.stream + 2 * self.hidden + 2 * self._float32
        if self.sizes.qk_norm:
            heads = (self.sizes.queries + self.sizes.keys) / self.sizes.shape.head_dim
            norms += self._qkv + heads * self._float32
        attention = self._padding.rows * self._read + self._scores + self.sizes.queries
        attention += self._padding.long * self._heads * self._float32
        if self._pads:
            attention += self._padding.long * self.sizes.queries
        return norms + attention + 3 * self.sizes.inner

    def backward_bytes(self, tokens: float) -> int:
        """Bytes of gradients in the backward pass at most, less what the layer has kept and does not need then."""
        s, hidden, inner = self.stream, self.hidden, self.sizes.inner
        gathered = hidden if self.strategy.sequence_parallel else 0
        copied = hidden if self.cpu else 0  # an operand of the product that is a weight's gradient
        moments = [
            # The gradients of the product, of gate and up, and one number while they are computed.
            self.bytes(tokens, s + 3 * inner),
            # Those of a matrix and of its input, when nothing that follows is needed any more.
            self.bytes(tokens, s + gathered + copied + inner) + self.matrix_bytes(inner * hidden),
            self.bytes(tokens, s + hidden + copied - inner) + self.matrix_bytes(2 * inner * hidden),
        ]
        if self._scores:
            # Those of scores and of their softmax, when the feed-forward block is done.
            padded = self._padding.rows * (self.sizes.queries + self.sizes.cached)
            done = 3 * inner + hidden + self.sizes.queries
            moments.append(self.bytes(tokens, padded + 2 * self._scores - done))
        return max(moments)

    def matrix_bytes(self, elements: int) -> int:
        """Bytes of a parameter's gradient before it is added up: as it is computed, and in float32."""
        return elements * (self.element_bytes + (4 if self.element_bytes < 4 else 0))

    def bytes(self, tokens: float, numbers: float) -> int:
        """Bytes of so many numbers per token."""
        return int(tokens * numbers * self.element_bytes)

    @cached_property
    def _padding(self) -> Padding:
        return Padding.of(self.lengths, dense=self.element_bytes == 4) if self._pads else Padding()

    @property
    def _pads(self) -> bool:
        """Whether attention lays sequences side by side."""
        return self.cpu or self.element_bytes == 4

    @property
    def _heads(self) -> float:
        return self.sizes.queries / self.sizes.shape.head_dim

    @property
    def _scores(self) -> float:
        return self._heads * self._padding.scores

    @property
    def _qkv(self) -> int:
        """Queries, keys and values as they are computed."""
        return self.sizes.queries + 2 * self.sizes.keys

    @property
    def _read(self) -> int:
        """Queries, keys and values as attention reads them: with a key for each query where groups are uneven."""
        return self.sizes.queries + 2 * self.sizes.cached

    @property
    def _float32(self) -> float:
        return 4 / self.element_bytes
