"""Bytes of logits and what is computed from them, on one rank."""

from dataclasses import dataclass

from realrl.planner.workload.sizes import LocalSizes

GPU_CHUNK, CPU_CHUNK = 1 << 26, 1 << 20
"""Logits that are computed at a time (`model.logprobs`)."""
SAMPLED_LOGIT_BYTES = 28
"""Of a token to be drawn without top-k and top-p: logits, log-probabilities and probabilities in float32, these and
their sums in float64 (`engine.sampling`)."""


@dataclass(frozen=True)
class Logits:
    """What follows the last layer's hidden states. Tokens are those of a micro-batch."""

    sizes: LocalSizes
    element_bytes: int
    cpu: bool

    @property
    def table_bytes(self) -> int:
        """Float32 gradient of the head, or of the embedding table."""
        return 4 * self.sizes.vocabulary * self.sizes.shape.hidden_size

    def sampled(self, rows: float) -> int:
        """Of the next tokens, which every tensor rank has whole."""
        return 0 if self._scalar else int(SAMPLED_LOGIT_BYTES * rows * self.sizes.shape.vocab_size)

    def scored(self, tokens: float) -> int:
        """Of one chunk in inference; for a scalar head, hidden states in float32 if they were not."""
        if self._scalar:
            return int(self._float32 * tokens * self.sizes.shape.hidden_size)
        return int(self._log_softmax * self._chunk(tokens))

    def learnt(self, tokens: float) -> int:
        """Of one chunk in the backward pass, with the gradient of the head.

        A micro-batch that is one chunk has its log-probabilities kept. First come log-probabilities, which turn
        into the gradient of logits, beside the sum of the head's gradient so far; then the gradient of logits
        beside that sum and what is added to it. A frozen head has no gradient.
        """
        if self._scalar:
            return int(2 * self._float32 * tokens * self.sizes.shape.hidden_size)
        chunk, table = self._chunk(tokens), self.table_bytes if self.sizes.trains_head else 0
        kept = 4 * chunk if chunk == tokens * self.sizes.vocabulary else 0
        added = table * self.element_bytes / 4 + (table if self.cpu and self._narrow else 0)
        return int(kept + max(self._log_softmax * chunk, self.element_bytes * chunk + added) + table)

    @property
    def _log_softmax(self) -> int:
        """Bytes per logit: the product and its float32 form, or that and its exponential for a sum over ranks."""
        return max(4 + self._narrow, 8 if self.sizes.tp > 1 else 0)

    @property
    def _narrow(self) -> int:
        """Bytes of a number that exists besides its float32 form."""
        return self.element_bytes if self.element_bytes < 4 else 0

    @property
    def _float32(self) -> int:
        """Bytes of a float32 form that exists besides the number."""
        return 4 if self.element_bytes < 4 else 0

    @property
    def _scalar(self) -> bool:
        return self.sizes.head == "scalar"

    def _chunk(self, tokens: float) -> float:
        return min(tokens * self.sizes.vocabulary, CPU_CHUNK if self.cpu else GPU_CHUNK)
