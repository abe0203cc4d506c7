"""Activation memory of one layer on one rank.

The formulas count the tensors that `model.transformer` and `model.attention` allocate, and the tensors that
operations save for the backward pass. Unless stated otherwise, sizes are elements per token in the model's type.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, reduce
from typing import Literal

import numpy as np

from realrl.families.shape import SWIGLU
from realrl.layout import limits
from realrl.layout.limits import ADDED_ELEMENTS, bucket_lengths
from realrl.planner.workload.shard_sizes import LocalSizes
from realrl.planner.workload.strategies import Strategies
from realrl.planner.workload.workload import compute_imbalance
from realrl.program.arrays import Floats, Ints, Real, truncate


def added_bytes(elements: int, element_bytes: int) -> int:
    """Compute the temporary bytes of a matrix's gradient while it is added to the float32 sum of gradients.

    Products in float32 add to the sum directly. In narrower types, the gradient is computed part by part, and each
    part is widened to float32.
    """
    return min(elements, ADDED_ELEMENTS) * (element_bytes + 4) if element_bytes < 4 else 0


Phase = Literal["pass", "prefill", "decode"]
"""Kind of a forward pass: of training or inference, or one of the two kinds of generation."""


@dataclass(frozen=True, kw_only=True)
class LayerMemory:
    """Activation sizes of a layer.

    `lengths` is a sample of sequence lengths for each strategy. The lengths matter only if attention pads
    sequences. This happens on a GPU, in float32 or in layers with a cap or sinks.
    """

    sizes: LocalSizes
    strategies: Strategies
    element_bytes: int
    cpu: bool
    lengths: Sequence[tuple[int, ...]]
    expert_spread: float = 0.0
    """`Efficiency.expert_spread`."""
    phase: Phase = "pass"
    """In a decode step, EP ranks gather all tokens (`Matrices.gathers_tokens`), and CP ranks do not divide the
    tokens, but gather the outputs of attention instead of keys and values. In a prefill of sequences whose prompts
    are in the cache, CP ranks also gather queries."""

    @cached_property
    def hidden(self) -> int:
        return self.sizes.shape.hidden_size

    @cached_property
    def stream(self) -> float:
        """Elements of the residual stream per token, which sequence parallelism shards."""
        return self.hidden / (self.sizes.tp if self.strategies.sequence_parallel else 1)

    def rotation_bytes(self, tokens: Real) -> Ints:
        """Compute the bytes of the rotary tables, which all layers share. They hold a float32 cosine and sine per
        pair of elements."""
        return truncate(tokens * 4 * self.sizes.shape.head_dim)

    def index_bytes(self, tokens: Real) -> Ints:
        """Compute the bytes of int64 indices from heads to padded heads and back, which all layers share."""
        if not self._pads:
            return truncate(0)
        heads = 2 * (self.sizes.q_dim + self.sizes.cache_dim) / self.sizes.shape.head_dim
        return truncate(8 * heads * (self._padded_rows + 1) * tokens)

    @cached_property
    def computed(self) -> Real:
        """Peak elements per token without gradients: in attention or in the feed-forward block.

        Attention holds the residual stream, queries, keys and values, and its output. On a CPU it also holds a
        log-sum-exp per head. If the model's type is narrower than float32, it holds float32 copies of its inputs
        and its output, too. If attention pads, it also holds padded queries, keys and values, a copy of keys and
        values for every query head, and three padded outputs.

        The feed-forward block holds the stream before and after attention. It also holds the largest of these
        three: its input with gate and up, gate and up with their product, or the product with the output.
        `_computed_experts` counts a mixture of experts. Norms of heads hold the stream, queries, keys and values,
        and two copies of the normalised heads: one before and one after concatenation.
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
        if self.phase == "decode":
            attention = attention + self._merged
        else:
            # Keys and values arrive in the order of ranks, and are copied in packed order.
            arriving = s + self._qkv + 2 * self._gathered + 2 * self.sizes.cache_dim
            held = np.maximum(attention + self._gathered, arriving)
            attention = np.where(self.strategies.cp > 1, held, attention)
        entering = self.hidden + (s if self.strategies.sequence_parallel else 0)
        up = gate_up + self._added(self.sizes.gate_up_dim)
        block = max(
            entering + up, gate_up + inner, inner + self.hidden + self._added(self.hidden), 2 * self.hidden
        )
        if self.sizes.experts:
            if self._hides_exchange:
                block = self._computed_with_shared
            else:
                # The output of the experts is held while a shared block is computed.
                shared = max(block, 2 * self.hidden) + self.hidden if self.sizes.shared_blocks else 0
                block = max(entering + self._computed_experts, shared)
        joined = 2 * self._qkv + self.sizes.q_dim + self.sizes.kv_dim if self.sizes.qk_norm else 0
        return np.maximum(attention, max(s + joined, 2 * s + block))

    @cached_property
    def kept(self) -> Real:
        """Elements per token saved for the backward pass.

        The norms save their inputs, outputs and float32 scales. Attention saves the queries, keys and values that
        it reads, its output, and a float32 log-sum-exp per head. The feed-forward block saves gate, up and their
        product. If attention pads, it saves padded copies of its inputs and outputs, with keys and values for every
        query head. Norms of heads save their inputs, and a float32 scale per head.
        """
        # If a layer also has norms after each block, four norms keep their input. LayerNorm also keeps a mean.
        options = self.sizes.options
        number, scales = 4 if options.norm_place == "around" else 2, 2 if options.norm == "layer" else 1
        norms = 2 * self.hidden + number * (self.stream + scales * self._float32)
        if self.sizes.qk_norm:
            heads = (self.sizes.q_dim + self.sizes.kv_dim) / self.sizes.shape.head_dim
            norms += self._qkv + heads * self._float32
        sums = self._heads * self._float32
        attention: Real
        if self._pads:
            # If scores are computed in memory, attention keeps neither the padded output nor its log-sum-exp.
            results = 0 if options.scores_in_memory else self.sizes.q_dim + sums
            attention = self._padded_rows * (self._read + 2 * self.sizes.q_dim + results) + self.sizes.q_dim
        else:
            attention = self._read + self.sizes.q_dim + sums
        attention = attention + self._gathered
        return norms + attention + self._kept_block + self._kept_adapters

    @cached_property
    def left_out(self) -> Real:
        """Elements per token that are kept from a backward pass until the gradients of weights are computed, if
        these are computed apart: the inputs of matrices, and the gradients of their outputs."""
        sizes, hidden = self.sizes, self.hidden
        if sizes.frozen_matrices:
            return 0.0
        attention = hidden + self._qkv + sizes.q_dim + hidden
        # Whether or not there are experts, the block's input is kept once.
        shared = sizes.shared_blocks * (sizes.gate_up_dim + sizes.ffn_dim + hidden)
        if not sizes.experts:
            return attention + hidden + shared
        inner, gate_up = sizes.expert_dim, sizes.expert_gate_up_dim
        arrived = self.hidden if sizes.weighs_inputs or sizes.ep > 1 else 0
        rows = self._rows * (gate_up + inner + hidden + arrived)
        return attention + hidden + shared + rows + sizes.experts * self._float32

    @property
    def _kept_block(self) -> float:
        """Elements per token that feed-forward blocks keep: gate, up and their product.

        An expert also keeps a weighted copy of this product or of its input. A mixture keeps its probabilities and
        choices.
        """
        if not self.sizes.experts:
            return self._kept_shared
        inner, gate_up = self.sizes.expert_dim, self.sizes.expert_gate_up_dim
        weighed = self.hidden if self.sizes.weighs_inputs else inner
        between = sum(adapter.inner for adapter in self.sizes.expert_adapters.values())
        rows = self._rows * (gate_up + inner + weighed + between + self._arrived)
        return rows + self._probabilities + self._choices + self._kept_shared

    @property
    def _rows(self) -> float:
        """Rows of experts per token on the EP rank with the most rows."""
        sizes = self.sizes
        if self.phase == "decode":
            return sizes.copies * sizes.ep
        return sizes.copies * compute_imbalance(sizes.experts, sizes.ep, self.expert_spread)

    @property
    def _arrived(self) -> int:
        """Elements of a row that has arrived from another EP rank, and is kept."""
        return self.hidden if self.sizes.ep > 1 else 0

    @property
    def _kept_shared(self) -> int:
        """Elements per token kept by the feed-forward block that all tokens pass through, if there is one."""
        return self.sizes.shared_blocks * (self.sizes.gate_up_dim + self.sizes.ffn_dim)

    @property
    def _computed_experts(self) -> float:
        """Peak elements per token of a mixture of experts without gradients, in addition to its input.

        A token has one row for each of its k experts. The peak is the largest of three moments. The first holds
        copies of the input with gate and up, and rows that have arrived from other EP ranks. The second holds gate
        and up with their product. The third holds the experts' outputs, in two orders, with their sum. On a CPU,
        gate and up of one expert exist twice at the first moment.
        """
        inner, gate_up = self.sizes.expert_dim, self.sizes.expert_gate_up_dim
        k = self._rows
        mixture = self.sizes.shape.mixture
        # A single output of a token is its sum.
        summed = mixture is not None and mixture.per_token > 1
        apart = k * self.sizes.ep / self.sizes.experts if self.cpu else 0
        adapters = self.sizes.expert_adapters
        up, down = adapters.get("experts_gate_up"), adapters.get("experts_down")
        weighed = self.hidden if self.sizes.weighs_inputs else 0
        # An adapter copies tokens again, unless they are weighed. It then makes a second product.
        second = max(self.hidden, gate_up + weighed)
        rows = max(
            0 if up is None else k * (self._arrived + gate_up + up.inner + second),
            0 if down is None else k * (inner + down.inner + 2 * self.hidden),
            k * (self._arrived + self.hidden + gate_up) + apart * gate_up,
            k * (gate_up + inner),
            2 * k * self.hidden + (self.hidden if summed else 0),
        )
        return rows + self._probabilities + self._choices

    @property
    def _hides_exchange(self) -> bool:
        """Whether a shared block is computed while EP ranks exchange tokens (`model.expert_parallel`)."""
        sizes = self.sizes
        return sizes.experts > 0 and sizes.ep > 1 and sizes.shared_blocks > 0 and self.phase != "decode"

    @property
    def _computed_with_shared(self) -> float:
        """Peak elements per token of experts and a shared block without gradients, if the block is computed while
        tokens are on their way.

        The peak is the largest of four moments. The first two hold the rows that are sent and those that arrive,
        with the first half of the shared block. The third holds the product of this half while experts are
        computed. The last holds the outputs that are sent and those that arrive, with the second half.
        """
        inner, gate_up = self.sizes.ffn_dim, self.sizes.gate_up_dim
        moved = 2 * self._rows * self.hidden + self._choices
        return max(
            moved + self.hidden + gate_up + self._added(gate_up),
            moved + gate_up + inner,
            inner + self._computed_experts,
            moved + inner + self.hidden + self._added(self.hidden),
        )

    @property
    def _probabilities(self) -> float:
        """Elements per token for the float32 probabilities of all experts. Sigmoids also need float64 numbers."""
        mixture = self.sizes.shape.mixture
        sigmoid = mixture is not None and mixture.scores == "sigmoid"
        return self.sizes.experts * self._float32 * (3 if sigmoid else 1)

    @property
    def _choices(self) -> float:
        """Elements per token that record its chosen experts.

        Each chosen expert takes four int64 (its number, place, order and token) and two float32 weights. Biases of
        experts also need the expert of each row, an int64, and its weight, which is 1 before the activation.
        """
        biased = self.sizes.expert_biases
        return self._rows * ((4 + biased) * 8 / self.element_bytes + (2 + biased) * self._float32)

    @property
    def _kept_adapters(self) -> int:
        """Elements per token that adapters keep: the values between A and B, and DoRA's products before scaling."""
        return sum(adapter.inner + adapter.rows * adapter.dora for adapter in self.sizes.adapters)

    def _added(self, outputs: int) -> int:
        """Elements per token of the largest block that adapters add to a product with `outputs` outputs.

        DoRA scales the sum, so it needs a copy of all outputs.
        """
        adapters = [a for a in self.sizes.adapters if a.rows <= outputs]
        return max((outputs if a.dora else max(a.blocks) for a in adapters), default=0)

    @property
    def projected(self) -> Real:
        """Elements per token of a prefill's last layer: its input, the normalised input, queries, keys and values.
        CP ranks also hold the keys and values of all of them, in the order of ranks and in packed order."""
        keys = 2 * self.sizes.cache_dim * (1 + 2 * self.strategies.cp)
        return self.stream + self.hidden + self._qkv + np.where(self.strategies.cp > 1, keys, 0)

    def backward_bytes(self, tokens: Real) -> Ints:
        """Compute the peak bytes of gradients in a layer's backward pass, minus the saved tensors that have been
        freed by then."""
        s = self.stream
        hidden = self.hidden
        inner, gate_up = self.sizes.ffn_dim, self.sizes.gate_up_dim
        # On a GPU, only gates in `SWIGLU` have one kernel for the whole backward pass. Others hold intermediate
        # gradients.
        options = self.sizes.options
        apart = options.gated and options.activation not in SWIGLU and not self.cpu
        between = 2 * inner if apart else 0
        frozen = self.sizes.frozen_matrices
        gathered = hidden if self.strategies.sequence_parallel else 0
        # oneDNN copies an operand of the matmul for the weight gradient. Adapters add a second gradient of the
        # input.
        copied = hidden if self.cpu or frozen else 0

        moments = [
            # The gradients of the product, of gate and of up. The product itself has been freed.
            self.bytes(tokens, s + gate_up + between),
            # The gradients of a matrix (down, then gate and up) and of its input. Saved tensors of later operations
            # have been freed.
            self.bytes(tokens, s + gathered + copied + inner) + self._added_bytes(inner * hidden),
            self.bytes(tokens, s + hidden + copied - inner) + self._added_bytes(gate_up * hidden),
        ]
        if self.sizes.experts:
            routed = self._expert_moments(tokens)
            if self._hides_exchange:
                # The second half of the shared block is differentiated while the gradients of outputs move, and the
                # first half while the gradients of rows move. Then the saved tensors of experts have been freed.
                moved = 2 * self._rows * hidden
                first, second, last = moments
                freed = self._kept_block - self._probabilities - self._choices - self._kept_shared
                moments = [
                    second + self.bytes(tokens, moved),
                    *routed,
                    *(moment + self.bytes(tokens, gathered + moved - freed) for moment in (first, last)),
                ]
            elif self.sizes.shared_blocks:
                # The shared block is differentiated first. Then its saved tensors are freed, and the gradient of
                # its input is held.
                held, after = self.bytes(tokens, gathered), self.bytes(tokens, hidden - self._kept_shared)
                moments = [*(moment + held for moment in moments), *(moment + after for moment in routed)]
            else:
                moments = routed
        queries = self.sizes.q_dim
        attention: Real
        if self._pads:
            # These tensors are padded: the gradients of outputs and queries, the gradients of keys and values for
            # every query head, and the product of outputs with their gradients. In bfloat16, some of these
            # gradients are float32 at first.
            widened = self._widened(3 * queries) if self.sizes.options.scores_in_memory else 0
            attention = self._padded_rows * (5 * queries + widened) - queries
        else:
            attention = queries + self._read
            if self.cpu:
                attention += self._widened(2 * self._read + 2 * queries)
        # The gradients of the keys and values of two pieces, and their sum.
        attention = attention + 3 * self._gathered
        if not self.cpu and self.sizes.q_dim != self.sizes.cache_dim:
            # The flash kernel computes the gradients of keys and values for every query head.
            attention = attention + np.where(
                self.strategies.cp > 1, 2 * self.sizes.q_dim * self.strategies.cp, 0
            )
        # By now the tensors that the feed-forward block saved have been freed.
        scores = self.score_bytes(tokens, backward=True)
        moments.append(self.bytes(tokens, attention - self._kept_block - hidden) + scores)
        return reduce(np.maximum, moments)

    def _expert_moments(self, tokens: Real) -> list[Ints]:
        """Compute the bytes at several moments of a mixture's backward pass, minus the saved tensors that have been
        freed by then.

        The backward pass gathers the rows of each expert again, for the gradients of its matrices.
        """
        inner, gate_up, hidden = self.sizes.expert_dim, self.sizes.expert_gate_up_dim, self.hidden
        gathered = hidden if self.strategies.sequence_parallel else 0
        k = self._rows
        adapters = self.sizes.expert_adapters
        # Adapters compute a gradient of their input too, which is held until the matrix's own is added.
        of_inner = inner if "experts_down" in adapters else 0
        of_input = hidden if "experts_gate_up" in adapters else 0
        moments = [
            # The experts' outputs at the end of the forward pass, in the order of experts and in the order of
            # tokens.
            self.bytes(tokens, 2 * k * hidden),
            # The gradients of the outputs, and of the activations that `down` multiplies.
            self.bytes(tokens, self.stream + k * (hidden + inner + of_inner))
            + self._added_bytes(inner * hidden),
            # The gradients of these activations, and of gate and up. The input of `down` has been freed.
            self.bytes(tokens, self.stream + k * gate_up),
        ]
        entering = self.stream + gathered
        if self.sizes.weighs_inputs:
            return [
                *moments,
                # The gradients of gate and up, and of their weighted inputs, which were kept.
                self.bytes(tokens, entering + k * (hidden - inner)) + self._added_bytes(gate_up * hidden),
                # The gradients of these inputs, times the weights, in two orders. All other tensors have been
                # freed.
                self.bytes(tokens, entering + k * (of_input + 2 * hidden - gate_up - inner)),
            ]
        return [
            *moments,
            # The gradients of gate and up, and their gathered inputs; then the gradients of these inputs, in two
            # orders. All other tensors have been freed.
            self.bytes(tokens, entering + k * (hidden - 2 * inner)) + self._added_bytes(gate_up * hidden),
            self.bytes(tokens, entering + of_input + k * (2 * hidden - 2 * inner)),
        ]

    def _added_bytes(self, elements: int) -> int:
        """Compute the temporary bytes of a matrix's gradient (`added_bytes`). On a GPU there are none.

        If matrices are frozen, only adapters have gradients, which are small enough to ignore.
        """
        added = self.cpu and not self.sizes.frozen_matrices
        return added_bytes(elements, self.element_bytes) if added else 0

    def forward_bytes(self, tokens: Real, held: Real = 0.0) -> Ints:
        """Compute the peak bytes of a pass without gradients, including `held` further elements per token."""
        return self.bytes(tokens, held + self.computed) + self.score_bytes(tokens, backward=False)

    def score_bytes(self, tokens: Real, *, backward: bool) -> Ints:
        """Compute the bytes of attention scores if attention stores them in memory. It stores them for a part of
        the queries at a time.

        The forward pass holds float32 weights. The backward pass holds float32 weights, their gradient, the product
        of both and, if there is a cap, the slope of the cap. Both passes also hold a cast to the model's type if
        this type is narrower.
        """
        options, float32 = self.sizes.options, self.element_bytes == 4
        if self.cpu or not (options.scores_in_memory or (float32 and self.sizes.shape.windowed_layers)):
            return truncate(0)
        longest = np.array([max(lengths) for lengths in self.lengths])
        most = tokens * self._padded_rows * longest * self._heads
        copies = 3 + (options.attention_cap is not None) if backward else 1
        return truncate(
            np.minimum(most, limits.GPU_SCORES) * (4 * copies + (0 if float32 else self.element_bytes))
        )

    def bytes(self, tokens: Real, numbers: Real) -> Ints:
        return truncate(tokens * numbers * self.element_bytes)

    @property
    def _gathered(self) -> Ints:
        """Elements, per token of a rank, of the gathered keys and values of all context-parallel ranks.

        If attention pads, every query head also gets its own copy. In a prefill, queries may be gathered, too.
        """
        numbers = 2 * self.sizes.cache_dim + (2 * self.sizes.q_dim if self._pads else 0)
        numbers += self.sizes.q_dim if self.phase == "prefill" else 0
        return np.where(self.strategies.cp > 1, numbers * self.strategies.cp, 0)

    @property
    def _merged(self) -> Floats:
        """Elements per row of the attention outputs of all context-parallel ranks in a decode step. They are
        float32, each with a log-sum-exp per head. A rank also copies its own, and holds scores and weights of all
        outputs and their sum."""
        ranks, heads = self.strategies.cp, self._heads
        outputs = (ranks + 1) * (self.sizes.q_dim + heads) + 2 * ranks * heads + self.sizes.q_dim
        return np.where(ranks > 1, outputs * self._float32 + self._widened(self.sizes.q_dim), 0.0)

    @cached_property
    def _padded_rows(self) -> Floats:
        """Ratio of the tokens after attention's padding to the tokens before it."""
        return np.array([_count_padded(lengths) for lengths in self.lengths])

    @property
    def _pads(self) -> bool:
        """Whether attention pads sequences into a dense batch."""
        return not self.cpu and (self.element_bytes == 4 or self.sizes.options.scores_in_memory)

    def _widened(self, numbers: Real) -> Real:
        """Elements, in the model's type, that float32 copies of `numbers` elements need. 0 if the model's type is
        float32."""
        return numbers * self._float32 if self.element_bytes < 4 else 0

    @property
    def _heads(self) -> float:
        return self.sizes.q_dim / self.sizes.shape.head_dim

    @property
    def _qkv(self) -> int:
        """Elements per token of queries, keys and values before heads are copied."""
        return self.sizes.q_dim + 2 * self.sizes.kv_dim

    @property
    def _read(self) -> int:
        """Elements per token of the queries, keys and values that attention reads.

        If query heads do not divide evenly among key heads, every query head has its own copy of keys and values.
        """
        return self.sizes.q_dim + 2 * self.sizes.cache_dim

    @property
    def _float32(self) -> float:
        return 4 / self.element_bytes


@lru_cache(maxsize=4096)
def _count_padded(lengths: tuple[int, ...]) -> float:
    """Compute the ratio of a batch's tokens after attention's padding to its tokens before it."""
    return sum(bucket.tokens for bucket in bucket_lengths(lengths)) / sum(lengths)
