"""Roofline time model of a layer, for sizes that have not been measured."""

from collections.abc import Sequence
from dataclasses import dataclass

from realrl.plan.placement import ELEMENT_BYTES, Dtype
from realrl.planner.cluster.devices import DeviceKind
from realrl.planner.cluster.efficiency import Efficiency
from realrl.planner.workload.experts import count_visited_experts
from realrl.planner.workload.shard_sizes import LocalSizes
from realrl.planner.workload.windows import average_context, average_squares


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """Time model of one TP rank from data-sheet figures and efficiencies, in seconds."""

    device: DeviceKind
    efficiency: Efficiency
    sizes: LocalSizes
    dtype: Dtype
    sequence_parallel: bool = False

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of activations and parameters."""
        return ELEMENT_BYTES[self.dtype]

    def matmul(self, rows: float, outputs: float, inputs: float) -> float:
        """Time a matmul of [rows, inputs] and [inputs, outputs]: arithmetic plus the traffic of three matrices.

        The sum rather than the maximum, because the first and last tiles overlap nothing. It reproduces how slow
        narrow matmuls are: with 1/8 of 4096 columns an A100 loses a fifth.
        """
        arithmetic = 2 * rows * outputs * inputs
        moved = self.element_bytes * (rows * inputs + inputs * outputs + rows * outputs)
        peak = self.device.flops(self.dtype) * self.efficiency.matmul
        return arithmetic / peak + self.traffic(moved)

    def traffic(self, number_bytes: float) -> float:
        """Time reads and writes of `number_bytes` of device memory."""
        return number_bytes / (self.device.memory_bytes_per_s * self.efficiency.memory)

    def layer(self, tokens: float, squares: float) -> float:
        """Time a layer forward. `squares`: sum of squared sequence lengths."""
        return (
            sum(self.matmul(tokens, *matrix) for matrix in self.sizes.matmul_shapes)
            + self._attention(tokens, squares)
            + self._scores(tokens, squares, self.efficiency.score_bytes)
            + self._elementwise(tokens)
            + self.adapters(tokens)
            + self.experts(tokens)
            + self.widen(self.sizes.widened_shapes)
        )

    def experts(self, rows: float) -> float:
        """Time the products of a layer's experts forward, for tokens that are spread evenly.

        Each token has a row for each of its experts; of the weights, those of experts without a token are not read.
        """
        visited = count_visited_experts(self.sizes.shape, rows)
        if not visited:
            return 0.0
        each = rows * self.sizes.copies / visited
        return visited * sum(self.matmul(each, *matrix) for matrix in self.sizes.expert_shapes)

    def adapters(self, rows: float) -> float:
        """Time a layer's adapters forward: products that are added to others; with DoRA, norms of rows, too."""
        seconds = 0.0
        for adapter in self.sizes.adapters:
            seconds += self.matmul(rows, adapter.inner, adapter.inputs)
            seconds += sum(self.matmul(rows, block, adapter.rank) for block in adapter.blocks)
            seconds += self.traffic(2 * rows * adapter.rows * self.element_bytes)
            if adapter.dora:
                weights = adapter.rows * adapter.inputs
                seconds += self.traffic((weights + 2 * rows * adapter.rows) * self.element_bytes)
                seconds += self.matmul(adapter.rows, adapter.rank, adapter.inputs)
        return seconds

    def widen(self, matrices: Sequence[tuple[int, int]]) -> float:
        """Time widening quantised matrices for their products, which read them in the type of the computation.

        A number is read as a byte and written; on a GPU a second kernel multiplies it by its scale.
        """
        if self.sizes.shape.quantised is None:
            return 0.0
        passes = 1 if self.device.cpu else 3
        elements = sum(rows * columns for rows, columns in matrices)
        seconds = self.traffic(elements * (1 + passes * self.element_bytes))
        slow = self.device.cpu and self.sizes.shape.quantised == "fp8"
        return seconds * (self.efficiency.cpu_fp8_widening if slow else 1)

    def layer_backward(self, tokens: float, squares: float) -> float:
        """Time a layer backward: two matmuls for each, attention 2.5 times (arXiv 2307.08691, section 3.1).

        A frozen matrix has one, and its adapters two.
        """
        products = 1 if self.sizes.frozen_matrices else 2
        return (
            products * sum(self.matmul(tokens, *matrix) for matrix in self.sizes.matmul_shapes)
            + products * self.experts(tokens)
            + 2.5 * self._attention(tokens, squares)
            + self._scores(tokens, squares, self.efficiency.score_backward_bytes)
            + self.efficiency.backward_passes * self._elementwise(tokens)
            + 2 * self.adapters(tokens)
        )

    def head(self, tokens: float) -> float:
        """Time log-probabilities, or values, of all tokens."""
        if self.sizes.head == "scalar":
            return self.traffic(tokens * self.sizes.shape.hidden_size * self.element_bytes)
        rows = self.sizes.padded_vocab
        logits = self.traffic(self.efficiency.logit_bytes * tokens * rows)
        return self.matmul(tokens, rows, self.sizes.shape.hidden_size) + logits

    def likeliest(self, tokens: float) -> float:
        """Time the selection of the likeliest tokens at all positions."""
        return self.traffic(self.efficiency.likeliest_bytes * tokens * self.sizes.padded_vocab)

    def head_backward(self, tokens: float) -> float:
        """Time the gradients of log-probabilities, or values; logits that are not kept are computed again."""
        if self.sizes.head == "scalar":
            return 2 * self.head(tokens)
        rows = self.sizes.padded_vocab
        logits = self.traffic(self.efficiency.logit_backward_bytes * tokens * rows)
        products = 1 + self.sizes.trains_head + (not self.sizes.keeps_logits(tokens, cpu=self.device.cpu))
        return products * self.matmul(tokens, rows, self.sizes.shape.hidden_size) + logits

    def decode(self, rows: float, context: float) -> float:
        """Time a layer of a decode step of `rows` sequences with `context` tokens each in the KV cache."""
        cache = (
            2 * rows * average_context(self.sizes.shape, context) * self.sizes.cache_dim * self.element_bytes
        )
        products = sum(self.matmul(rows, *matrix) for matrix in self.sizes.matmul_shapes)
        products += self.experts(rows) + self.widen(self.sizes.widened_shapes)
        return products + self.traffic(cache) + self._elementwise(rows) + self.adapters(rows)

    def qkv(self, tokens: float) -> float:
        """Time the queries, keys and values of a layer."""
        matrix = self.sizes.matmul_shapes[0]
        return self.matmul(tokens, *matrix) + self.widen([matrix])

    def sample(self, rows: float) -> float:
        """Time logits and sampling of the next token of `rows` sequences."""
        logits = self.matmul(rows, self.sizes.padded_vocab, self.sizes.shape.hidden_size)
        return logits + self.traffic(self.efficiency.sampled_logit_bytes * rows * self.sizes.shape.vocab_size)

    def _attention(self, tokens: float, squares: float) -> float:
        """Seconds of causal attention, 2 * s² * query dimension FLOPs: half of scores and their product with
        values; less in layers with a sliding window."""
        # `mixed` models round no operands of attention.
        dtype = "float32" if self.dtype == "mixed" else self.dtype
        peak = self.device.flops(dtype) * self.efficiency.attention
        return 2 * average_squares(self.sizes.shape, tokens, squares) * self.sizes.q_dim / peak

    def _scores(self, tokens: float, squares: float, score_bytes: float) -> float:
        """Seconds of the traffic of scores, where they are computed in memory: on a GPU, by rules that no kernel of
        a library knows."""
        if self.device.cpu or not self.sizes.options.scores_in_memory:
            return 0.0
        scores = average_squares(self.sizes.shape, tokens, squares) / 2 * self.sizes.q_dim
        return self.traffic(score_bytes * scores / self.sizes.shape.head_dim)

    def _elementwise(self, tokens: float) -> float:
        e = self.efficiency
        s = self.sizes
        hidden = s.shape.hidden_size / (s.tp if self.sequence_parallel else 1)
        values = (
            e.normal_passes * hidden
            + e.rotary_passes * (s.q_dim + s.kv_dim)
            + e.attention_passes * (2 * s.q_dim + 2 * s.kv_dim)
            + (s.copies + s.shared_blocks) * e.activation_passes * s.gate_up_dim / 2
        )
        if s.experts:
            # Rows are gathered, weighted, and those of a token added up; the router's probabilities are float32.
            weighed = s.shape.hidden_size if s.weighs_inputs else s.ffn_dim
            values += s.copies * (2 * s.shape.hidden_size + 2 * weighed + 3 * s.shape.hidden_size)
            values += 3 * s.shared_blocks * s.shape.hidden_size
            values += e.router_passes * s.experts * 4 / self.element_bytes
        if s.qk_norm:
            values += 2 * (s.q_dim + s.kv_dim) + 2 * (s.q_dim + 2 * s.kv_dim)  # normalised, and put together
        return self.traffic(tokens * values * self.element_bytes)
