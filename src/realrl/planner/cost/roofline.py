"""Seconds of a layer's arithmetic from peak figures, where nothing has been measured."""

from dataclasses import dataclass

from realrl.planner.cluster.devices import DeviceKind
from realrl.planner.cluster.efficiency import Efficiency
from realrl.planner.workload.sizes import LocalSizes


@dataclass(frozen=True)
class Roofline:
    """A device that computes on one tensor rank's part of a model."""

    device: DeviceKind
    efficiency: Efficiency
    sizes: LocalSizes
    element_bytes: int
    sequence_parallel: bool = False

    def product(self, rows: float, outputs: float, inputs: float) -> float:
        """[rows, inputs] times [inputs, outputs]: arithmetic, and the traffic of three matrices, in sum.

        The sum rather than the larger of the two, because the first and last tiles hide nothing; it makes narrow
        products as slow as they are: with 1/8 of 4096 columns an A100 loses a fifth.
        """
        arithmetic = 2 * rows * outputs * inputs
        moved = self.element_bytes * (rows * inputs + inputs * outputs + rows * outputs)
        peak = self.device.flops(self.element_bytes) * self.efficiency.product
        return arithmetic / peak + self.traffic(moved)

    def traffic(self, number_bytes: float) -> float:
        """Reading and writing so many bytes of device memory."""
        return number_bytes / (self.device.memory_bytes_per_s * self.efficiency.memory)

    def layer(self, tokens: float, squares: float) -> float:
        """A layer forward. squares: sum of the squared lengths of the sequences."""
        return (
            sum(self.product(tokens, *matrix) for matrix in self.sizes.products)
            + self._attention(squares)
            + self._elementwise(tokens)
        )

    def layer_backward(self, tokens: float, squares: float) -> float:
        """A layer backward: two products for each, attention 2.5 times (arXiv 2307.08691, section 3.1)."""
        return (
            2 * sum(self.product(tokens, *matrix) for matrix in self.sizes.products)
            + 2.5 * self._attention(squares)
            + self.efficiency.backward_passes * self._elementwise(tokens)
        )

    def head(self, tokens: float) -> float:
        """Log-probabilities, or values, of all tokens."""
        if self.sizes.head == "scalar":
            return self.traffic(tokens * self.sizes.shape.hidden_size * self.element_bytes)
        rows = self.sizes.vocabulary
        logits = self.traffic(self.efficiency.logit_bytes * tokens * rows)
        return self.product(tokens, rows, self.sizes.shape.hidden_size) + logits

    def head_backward(self, tokens: float) -> float:
        """Their gradients; logits are computed again."""
        if self.sizes.head == "scalar":
            return 2 * self.head(tokens)
        rows = self.sizes.vocabulary
        logits = self.traffic(self.efficiency.logit_backward_bytes * tokens * rows)
        return 3 * self.product(tokens, rows, self.sizes.shape.hidden_size) + logits

    def decode(self, rows: float, context: float) -> float:
        """A layer for one more token of `rows` sequences with `context` tokens in the cache each."""
        cache = 2 * rows * context * self.sizes.cached * self.element_bytes
        products = sum(self.product(rows, *matrix) for matrix in self.sizes.products)
        return products + self.traffic(cache) + self._elementwise(rows)

    def sample(self, rows: float) -> float:
        """Logits and the next token of `rows` sequences."""
        product = self.product(rows, self.sizes.vocabulary, self.sizes.shape.hidden_size)
        return product + self.traffic(
            self.efficiency.sampled_logit_bytes * rows * self.sizes.shape.vocab_size
        )

    def _attention(self, squares: float) -> float:
        """Scores and their product with the values, of which causality needs half: 2 * s² * width."""
        peak = self.device.flops(self.element_bytes) * self.efficiency.attention
        return 2 * squares * self.sizes.queries / peak

    def _elementwise(self, tokens: float) -> float:
        e, s = self.efficiency, self.sizes
        hidden = s.shape.hidden_size / (s.tp if self.sequence_parallel else 1)
        values = (
            e.normal_passes * hidden
            + e.rotary_passes * (s.queries + s.keys)
            + e.attention_passes * (2 * s.queries + 2 * s.keys)
            + e.activation_passes * s.inner
        )
        if s.qk_norm:
            values += 2 * (s.queries + s.keys) + 2 * (s.queries + 2 * s.keys)  # normalised, and put together
        return self.traffic(tokens * values * self.element_bytes)
