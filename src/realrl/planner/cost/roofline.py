"""Time model of a layer without a profile. It uses tables of measured operators, and a roofline for all other
times."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from realrl.plan.placement import ELEMENT_BYTES, Dtype
from realrl.planner.cluster.devices import DeviceKind
from realrl.planner.cluster.efficiency import Efficiency
from realrl.planner.operators.tables import TABULATED, Operators, find_operators
from realrl.planner.workload.shard_sizes import LocalSizes
from realrl.planner.workload.windows import average_context, average_squares, find_windowed_share
from realrl.planner.workload.workload import Sampling, compute_imbalance, count_visited_experts
from realrl.program.arrays import Bools, Real


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """Time model of one TP rank, in seconds.

    If the device has operator tables, products and attention in bfloat16 are looked up there. All other times are
    computed from data-sheet figures and `Efficiency`.
    """

    device: DeviceKind
    efficiency: Efficiency
    sizes: LocalSizes
    dtype: Dtype
    sequence_parallel: bool = False

    @property
    def element_bytes(self) -> int:
        return ELEMENT_BYTES[self.dtype]

    @cached_property
    def operators(self) -> Operators | None:
        """Tables of measured operators. None if the device has none, or if the data type is not bfloat16."""
        return find_operators(self.device) if self.dtype == TABULATED else None

    def matmul(self, rows: Real, outputs: Real, inputs: Real) -> Real:
        """Predict the seconds of a matmul of [rows, inputs] and [inputs, outputs]."""
        if self.operators is not None:
            return self.operators.product(rows, outputs, inputs)
        return self._estimate_matmul(rows, outputs, inputs)

    def matmul_backward(self, rows: Real, outputs: Real, inputs: Real, *, trained: bool) -> Real:
        """Predict the seconds of the gradient of a matmul's input and, if `trained`, the gradient of its
        weights."""
        seconds = self.matmul(rows, inputs, outputs)
        return seconds + self.matmul(outputs, inputs, rows) if trained else seconds

    def _estimate_matmul(self, rows: Real, outputs: Real, inputs: Real) -> Real:
        """Predict the seconds of a matmul as its arithmetic plus the memory traffic of its three matrices.

        The times are added, because nothing overlaps the first and the last tiles. Unlike the maximum, the sum
        reproduces that narrow matmuls are slow: with 512 instead of 4,096 columns, an A100 loses a fifth of its
        speed.
        """
        arithmetic = 2 * rows * outputs * inputs
        moved = self.element_bytes * (rows * inputs + inputs * outputs + rows * outputs)
        peak = self.device.flops(self.dtype) * self.efficiency.matmul
        return arithmetic / peak + self.traffic(moved)

    def traffic(self, number_bytes: Real) -> Real:
        """Predict the seconds to read or write `number_bytes` of device memory."""
        return number_bytes / (self.device.memory_bytes_per_s * self.efficiency.memory)

    def _stream(self, number_bytes: Real, kernels: int) -> Real:
        """Predict the seconds of `kernels` kernels that together read and write `number_bytes`. On a GPU, a kernel
        has a minimum time."""
        least = 0.0 if self.device.cpu else kernels * self.efficiency.least_kernel_s
        return np.maximum(least, self.traffic(number_bytes))

    def layer(self, tokens: Real, squares: Real) -> Real:
        """Estimate the seconds of one layer's forward pass. `squares`: sum of squared sequence lengths."""
        return (
            sum(self.matmul(tokens, *matrix) for matrix in self.sizes.matmul_shapes)
            + self._attention(tokens, squares)
            + self._scores(tokens, squares, self.efficiency.score_bytes)
            + self._elementwise(tokens)
            + self.adapters(tokens)
            + self.experts(tokens)
            + self.widen(self.sizes.widened_shapes)
        )

    def experts(self, rows: Real, alike: Real = 1) -> Real:
        """Predict the seconds of the products of a layer's experts forward, if each token chooses its experts at
        random. `alike`: number of EP ranks that have the same tokens.

        Each token has a row for each of its experts. The weights of experts without a token are not read. On a GPU
        one kernel computes the products of all experts, so the tables of single products do not apply. With expert
        parallelism, tokens of all EP ranks arrive, and all ranks wait for the one with the most rows.
        """
        if not self.sizes.experts:
            return 0.0
        visited = self._count_visited(rows / alike)
        each = rows * self.sizes.copies / visited
        seconds = visited * sum(self._estimate_matmul(each, *matrix) for matrix in self.sizes.expert_shapes)
        return self.busiest * seconds

    def _count_visited(self, rows: Real) -> Real:
        """Count the experts on this rank that at least one token chooses. `rows`: the tokens of a rank."""
        ep = self.sizes.ep
        tokens = rows if ep == 1 else rows / self.sizes.tp * ep
        return count_visited_experts(self.sizes.shape, tokens) / ep

    @property
    def busiest(self) -> float:
        """Rows of the EP rank with the most rows, divided by the mean of all EP ranks."""
        return compute_imbalance(self.sizes.experts, self.sizes.ep, self.efficiency.expert_spread)

    def adapters(self, rows: Real) -> Real:
        """Predict the seconds of a layer's adapters forward: products with A and B, added to the matrix's own
        product.

        DoRA also computes B times A, and the norms of the rows of the sum of this product and the matrix.
        """
        seconds: Real = 0.0
        for adapter in self.sizes.adapters:
            seconds += self.matmul(rows, adapter.inner, adapter.inputs)
            seconds += sum(self.matmul(rows, block, adapter.rank) for block in adapter.blocks)
            seconds += self.traffic(2 * rows * adapter.rows * self.element_bytes)
            if adapter.dora:
                weights = adapter.rows * adapter.inputs
                seconds += self.traffic((weights + 2 * rows * adapter.rows) * self.element_bytes)
                seconds += self.matmul(adapter.rows, adapter.rank, adapter.inputs)
        return seconds + self.busiest * self._expert_adapters(rows)

    def _expert_adapters(self, rows: Real) -> Real:
        """Predict the seconds of the adapters of a layer's experts forward, for an even distribution of rows."""
        if not self.sizes.expert_adapters:
            return 0.0
        visited, copies = self._count_visited(rows), rows * self.sizes.copies
        seconds: Real = 0.0
        for adapter in self.sizes.expert_adapters.values():
            for matrix in ((adapter.rank, adapter.inputs), (adapter.rows, adapter.rank)):
                seconds += visited * self._estimate_matmul(copies / visited, *matrix)
            seconds += self.traffic(2 * copies * adapter.rows * self.element_bytes)
        return seconds

    def widen(self, matrices: Sequence[tuple[int, int]]) -> Real:
        """Predict the seconds to widen quantised matrices, given as (rows, columns), to the type of the
        computation.

        Each number is read as one byte and written in the wide type. On a GPU a second kernel multiplies the number
        by its scale, so it reads and writes the number again.
        """
        if self.sizes.shape.quantised is None:
            return 0.0
        passes = 1 if self.device.cpu else 3
        elements = sum(rows * columns for rows, columns in matrices)
        seconds = self.traffic(elements * (1 + passes * self.element_bytes))
        slow = self.device.cpu and self.sizes.shape.quantised == "fp8"
        return seconds * (self.efficiency.cpu_fp8_widening if slow else 1)

    def layer_backward(self, tokens: Real, squares: Real) -> Real:
        """Predict the seconds of a layer's backward pass.

        For each matmul of the forward pass, the backward pass has two: for the gradients of its input and of its
        weights. A frozen matrix needs only the first of them. Its adapters need both. Attention takes 2.5 times its
        forward time (arXiv 2307.08691, section 3.1).
        """
        trained = not self.sizes.frozen_matrices
        return (
            sum(self.matmul_backward(tokens, *matrix, trained=trained) for matrix in self.sizes.matmul_shapes)
            + (1 + trained) * self.experts(tokens)
            + 2.5 * self._attention(tokens, squares)
            + self._scores(tokens, squares, self.efficiency.score_backward_bytes)
            + self._elementwise_backward(tokens)
            + 2 * self.adapters(tokens)
        )

    def shared_block(self, tokens: Real) -> tuple[Real, Real]:
        """Predict the seconds of the two halves of a mixture's shared block, forward: the first product with the
        activation, and the second product. They are parts of `layer`."""
        activation = self._activation(tokens, self.efficiency.activation_passes)
        first, second = (self.matmul(tokens, *matrix) for matrix in self._shared_shapes)
        return first + activation, second

    def shared_block_backward(self, tokens: Real, *, apart: Bools) -> tuple[Real, Real]:
        """Predict the seconds of the two halves of a mixture's shared block, backward: parts of `layer_backward`.

        If the gradients of weights are computed `apart`, after the pass, they do not count.
        """
        activation = self._activation(tokens, self.efficiency.activation_backward_passes)
        first, second = (
            self.matmul_backward(tokens, *matrix, trained=False)
            + np.where(apart | self.sizes.frozen_matrices, 0.0, self.matmul(*matrix, tokens))
            for matrix in self._shared_shapes
        )
        return first + activation, second

    @property
    def _shared_shapes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Sizes of the matrices of a mixture's shared block."""
        return self.sizes.matrices["gate_up"], self.sizes.matrices["down"]

    def _activation(self, tokens: Real, passes: float) -> Real:
        """Seconds of the memory traffic of the shared block's activation."""
        return self.traffic(tokens * self.sizes.gate_up_dim * passes / 2 * self.element_bytes)

    def accumulate_gradients(self, tokens: Real) -> Real:
        """Predict the seconds to add the gradients of a layer's matrices to the sums over earlier micro-batches."""
        e, sizes = self.efficiency, self.sizes
        apart = self.device.cpu and self.element_bytes < 4
        own = e.apart_gradient_bytes if apart else e.gradient_bytes + self._widened
        if sizes.frozen_matrices:
            trained: Real = sum(adapter.elements for adapter in sizes.adapters)
            if sizes.expert_adapters:
                each = sum(adapter.elements for adapter in sizes.expert_adapters.values())
                trained = trained + self._count_visited(tokens) * each
            return self.traffic(own * trained)
        visited = self._count_visited(tokens)
        of_experts = visited * sum(outputs * inputs for outputs, inputs in sizes.expert_shapes)
        elements = sum(outputs * inputs for outputs, inputs in sizes.matmul_shapes)
        return self.traffic(own * (elements + of_experts))

    def weight_gradients(self, tokens: Real) -> Real:
        """Predict the seconds of the gradients of a layer's matrices: a part of `layer_backward`, with
        `accumulate_gradients`. Those of adapters do not count."""
        sizes = self.sizes
        if sizes.frozen_matrices:
            return 0.0
        products = sum(self.matmul(outputs, inputs, tokens) for outputs, inputs in sizes.matmul_shapes)
        return products + self.experts(tokens) + self.accumulate_gradients(tokens)

    def head(self, tokens: Real) -> Real:
        """Predict the seconds to compute the log-probabilities, or the values, of all tokens."""
        if self.sizes.head == "scalar":
            return self.traffic(tokens * self.sizes.shape.hidden_size * self.element_bytes)
        rows, e = self.sizes.padded_vocab, self.efficiency
        each = e.cpu_logit_bytes if self.device.cpu else e.logit_bytes + self._widened
        return self.matmul(tokens, rows, self.sizes.shape.hidden_size) + self.traffic(each * tokens * rows)

    def likeliest(self, tokens: Real) -> Real:
        """Predict the seconds to select the likeliest tokens at all positions."""
        return self.traffic(self.efficiency.likeliest_bytes * tokens * self.sizes.padded_vocab)

    def head_backward(self, tokens: Real) -> Real:
        """Predict the seconds of the backward pass of log-probabilities, or of values.

        It computes the logits again if the forward pass did not keep them.
        """
        if self.sizes.head == "scalar":
            return 2 * self.head(tokens)
        rows, e = self.sizes.padded_vocab, self.efficiency
        each = e.cpu_logit_backward_bytes if self.device.cpu else e.logit_backward_bytes
        logits = self.traffic(each * tokens * rows)
        matrix = rows, self.sizes.shape.hidden_size
        kept = self.sizes.keeps_logits(tokens, cpu=self.device.cpu)
        again = np.where(kept, 0.0, self.matmul(tokens, *matrix))
        seconds = again + self.matmul_backward(tokens, *matrix, trained=self.sizes.trains_head) + logits
        if self.device.cpu or not self.sizes.trains_head:
            return seconds
        # On a GPU, each chunk of logits adds to the gradient of the whole table.
        _, chunks = self.sizes.count_logit_chunks(tokens, cpu=False)
        return seconds + self.traffic(chunks * (e.gradient_bytes + self._widened) * math.prod(matrix))

    def decode(self, rows: Real, context: Real, cp: Real = 1) -> Real:
        """Predict the seconds of a layer in a decode step of `rows` sequences with `context` tokens each in the KV
        cache, which `cp` ranks divide.

        CP ranks compute everything but attention for all rows. If they divide experts, each of them hands on the
        same rows, so the tokens of all EP ranks choose fewer experts.
        """
        alike = np.clip(cp, 1, max(1, self.sizes.ep // self.sizes.tp))
        products = sum(self.matmul(rows, *matrix) for matrix in self.sizes.matmul_shapes)
        products += self.experts(rows, alike) + self._gather_experts(rows)
        products += self.widen(self.sizes.widened_shapes)
        attention = self._decode_attention(rows, context, cp) + self.merge(rows, cp)
        return products + attention + self._elementwise(rows) + self.adapters(rows)

    def merge(self, rows: Real, cp: Real) -> Real:
        """Predict the seconds to merge the attention outputs of `cp` ranks. Each rank copies its own output, weighs
        the outputs of all ranks, adds them up, and rounds the sum."""
        merged = self._stream((3 * cp + 5) * self.output_bytes(rows), self.efficiency.merge_operations)
        return np.where(np.asarray(cp) > 1, merged, 0.0)

    def output_bytes(self, rows: Real) -> Real:
        """Compute the bytes of the attention outputs of a CP rank, with a log-sum-exp per head, in float32."""
        return 4 * rows * (self.sizes.q_dim + self.sizes.q_dim / self.sizes.shape.head_dim)

    def _gather_experts(self, rows: Real) -> Real:
        """Predict the seconds to copy the rows of a decode step's experts, if ranks divide experts.

        Each rank gathers the tokens of all ranks. It has a row for each expert of each of these tokens, also for
        the experts of other ranks. Six passes over these rows copy, mask and sum them.
        """
        sizes = self.sizes
        if sizes.ep == 1 or not sizes.experts:
            return 0.0
        return self.traffic(6 * rows * sizes.copies * sizes.ep * sizes.shape.hidden_size * self.element_bytes)

    def _decode_attention(self, rows: Real, context: Real, cp: Real) -> Real:
        """Predict the seconds of attention in a decode step. Without operator tables, this is the time to read the
        keys and values of all rows. Each of `cp` ranks has every `cp`-th token of a row, also of those in a
        window."""
        sizes = self.sizes
        if self.operators is not None:
            head = sizes.shape.head_dim
            heads = sizes.q_dim / head, sizes.cache_dim / head, head
            share = find_windowed_share(sizes.shape)
            seconds = (1 - share) * self.operators.decode(rows, context / cp, *heads)
            if share:
                window = (sizes.shape.window or 0) / cp
                seconds += share * self.operators.decode(rows, context / cp, *heads, window)
            return seconds
        keys = rows * average_context(sizes.shape, context) / cp
        return self.traffic(2 * keys * sizes.cache_dim * self.element_bytes)

    def qkv(self, tokens: Real) -> Real:
        """Predict the seconds of the product that computes a layer's queries, keys and values."""
        matrix = self.sizes.matmul_shapes[0]
        return self.matmul(tokens, *matrix) + self.widen([matrix])

    def sample(self, rows: Real, sampling: Sampling) -> Real:
        """Predict the seconds to compute logits and sample the next token of `rows` sequences."""
        logits = self.matmul(rows, self.sizes.padded_vocab, self.sizes.shape.hidden_size)
        e = self.efficiency
        each = (
            e.sampled_logit_bytes
            + e.gathered_logit_bytes * (self.sizes.tp > 1)
            + e.minimum_bytes * sampling.minimum
            + e.top_k_bytes * sampling.top_k
            + e.top_p_bytes * sampling.top_p
        )
        number_bytes = (each + self._widened) * rows * self.sizes.shape.vocab_size
        return logits + self._stream(number_bytes, self.count_sampling_operations(sampling) - 1)

    def count_sampling_operations(self, sampling: Sampling) -> int:
        """Count the kernels of a decode step outside its layers: embedding, head and sampling."""
        e = self.efficiency
        return (
            e.sampling_operations
            + e.minimum_operations * sampling.minimum
            + e.top_k_operations * sampling.top_k
            + e.top_p_operations * sampling.top_p
        )

    def _attention(self, tokens: Real, squares: Real) -> Real:
        """Seconds of causal attention.

        A sequence of s tokens takes 2 * s² * query dimension FLOPs: half of 2 * s² for the scores, and half of 2 *
        s² for their product with the values, since masked halves are skipped. Sliding windows need fewer FLOPs.
        """
        if self.operators is not None:
            return self._tabulated_attention(self.operators, tokens, squares)
        # `mixed` rounds operands of matmuls to bfloat16, but not those of attention.
        dtype = "float32" if self.dtype == "mixed" else self.dtype
        peak = self.device.flops(dtype) * self.efficiency.attention
        return 2 * average_squares(self.sizes.shape, tokens, squares) * self.sizes.q_dim / peak

    def _tabulated_attention(self, operators: Operators, tokens: Real, squares: Real) -> Real:
        sizes, head = self.sizes, self.sizes.shape.head_dim
        heads = sizes.q_dim / head, sizes.kv_dim / head, head
        share = find_windowed_share(sizes.shape)
        seconds = (1 - share) * operators.prefill(tokens, squares, *heads)
        if share:
            seconds += share * operators.prefill(tokens, squares, *heads, sizes.shape.window or 0)
        return seconds * (self.efficiency.flash2_slower if operators.flash3 else 1.0)

    def _scores(self, tokens: Real, squares: Real, score_bytes: float) -> Real:
        """Seconds of the memory traffic of attention scores.

        Scores are in memory only on a GPU, if the layer has options that no library kernel supports.
        """
        if self.device.cpu or not self.sizes.options.scores_in_memory:
            return 0.0
        scores = average_squares(self.sizes.shape, tokens, squares) / 2 * self.sizes.q_dim
        return self.traffic(score_bytes * scores / self.sizes.shape.head_dim)

    def _elementwise(self, tokens: Real) -> Real:
        """Seconds of a layer's forward kernels other than products and attention, by their memory traffic."""
        e, s = self.efficiency, self.sizes
        values = (
            e.normal_passes * self._own_hidden
            + (e.copied_passes * s.shape.hidden_size if s.tp > 1 else 0)
            + e.rotary_passes * (s.q_dim + s.kv_dim)
            + self._attention_values
            + self._block_values * e.activation_passes / 2
        )
        if s.experts:
            # Rows are gathered for each expert, weighted, and the rows of a token are added up.
            values += self._rows * (5 * s.shape.hidden_size + 2 * self._weighed)
            values += s.shape.hidden_size * (1 + 3 * s.shared_blocks) + self._router_values
            # Biases are added in place.
            values += 2 * self._rows * (s.expert_gate_up_dim + s.shape.hidden_size) * s.expert_biases
        if s.qk_norm:
            # Queries and keys are normalised, and then concatenated with the values.
            values += 2 * (s.q_dim + s.kv_dim) + 2 * (s.q_dim + 2 * s.kv_dim)
        kernels = e.forward_operations - len(s.matmul_shapes) - 1
        return self._stream(tokens * values * self.element_bytes, kernels)

    def _elementwise_backward(self, tokens: Real) -> Real:
        """Seconds of a layer's backward kernels other than products and attention, by their memory traffic."""
        e, s = self.efficiency, self.sizes
        projected = s.q_dim + 2 * s.kv_dim
        values = (
            e.normal_backward_passes * self._own_hidden
            + e.rotary_backward_passes * projected
            + 2 * self._attention_values
            + self._block_values * e.activation_backward_passes / 2
        )
        if s.experts:
            # Rows are gathered twice. The gradient of a weight is a sum of products. Gradients of a token are added
            # up.
            values += self._rows * (7 * s.shape.hidden_size + 6 * self._weighed)
            values += s.shape.hidden_size * (4 + 3 * s.shared_blocks) + self._router_values
        if s.qk_norm:
            values += 5 * (s.q_dim + s.kv_dim) + e.head_norm_passes * projected
        kernels = e.backward_operations - 2 * len(s.matmul_shapes) - 1
        return self._stream(tokens * values * self.element_bytes, kernels)

    @property
    def _widened(self) -> int:
        """Extra bytes per number of a product's result if it is written in float32 instead of the model's type."""
        return max(0, 4 - self.element_bytes)

    @property
    def _own_hidden(self) -> float:
        """Mean number of hidden-state elements per token on a rank. Sequence parallelism divides tokens among TP
        ranks."""
        return self.sizes.shape.hidden_size / (self.sizes.tp if self.sequence_parallel else 1)

    @property
    def _attention_values(self) -> float:
        """Numbers per token that attention reads and writes. 0 if operator tables include this time."""
        if self.operators is not None:
            return 0.0
        return self.efficiency.attention_passes * (2 * self.sizes.q_dim + 2 * self.sizes.kv_dim)

    @property
    def _rows(self) -> float:
        """Rows of experts per token on the rank with the most rows."""
        return self.busiest * self.sizes.copies

    @property
    def _block_values(self) -> float:
        """Numbers per token before the activations of all feed-forward blocks."""
        s = self.sizes
        return self._rows * s.expert_gate_up_dim + s.shared_blocks * s.gate_up_dim

    @property
    def _weighed(self) -> int:
        """Numbers per row of an expert that are multiplied by the expert's weight."""
        return self.sizes.shape.hidden_size if self.sizes.weighs_inputs else self.sizes.expert_dim

    @property
    def _router_values(self) -> float:
        """Memory traffic of a token's float32 expert probabilities, counted in numbers of the model's type."""
        return self.efficiency.router_passes * self.sizes.experts * 4 / self.element_bytes
