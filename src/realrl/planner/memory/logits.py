"""Memory of logits and derived tensors on one rank."""

from dataclasses import dataclass

import numpy as np

from realrl.dataflow.call import Candidates
from realrl.planner.memory.layer import added_bytes
from realrl.planner.workload.shard_sizes import LocalSizes
from realrl.program.arrays import Ints, Real, truncate

_SAMPLED_BYTES = 12
"""Bytes per logit of a sampled token: its float32 logit, log-probability and probability.

A GPU needs 4 bytes more, for probabilities that top-p restricts or that are padded to whole blocks."""
_FOUND_BYTES = 12
"""Bytes per selected likeliest token: its id in int64, and its log-probability in float32."""
_GIVEN_BYTES = 16
"""Bytes per given candidate token, for two copies of its int64 id. One copy covers all positions. The other covers
the predicted positions, next to the id of each predicted token."""
_DIVERGENCE_BYTES = 32
"""Bytes per given candidate token to compute a Jensen-Shannon divergence without gradient: eight float32
numbers."""
_LOSS_BYTES = 60
"""Bytes per given candidate token to compute this divergence with a gradient: fifteen float32 numbers."""


@dataclass(frozen=True)
class Logits:
    """Memory of the output head, in bytes. In methods, `tokens` is the number of tokens of a micro-batch."""

    sizes: LocalSizes
    element_bytes: int
    cpu: bool
    candidates: Candidates | None = None
    """The call's candidates."""

    def sampled(self, rows: Real) -> Ints:
        """Compute the bytes of the next tokens' logits, which every TP rank holds in full."""
        each = _SAMPLED_BYTES + (0 if self.cpu else 4)
        return truncate(0 if self._scalar else each * rows * self.sizes.shape.vocab_size)

    def scored(self, tokens: Real) -> Ints:
        """Compute the bytes of one logit chunk in inference.

        A scalar head instead holds hidden states that are cast to float32.
        """
        if self._scalar:
            return truncate(self._float32 * tokens * self.sizes.shape.hidden_size)
        chunk = self._log_softmax * self._chunk(tokens)
        if self.candidates is None:
            return truncate(chunk)
        numbers, tp = self.candidates.count * tokens, self.sizes.tp
        in_chunk = numbers * self._chunk(tokens) / (tokens * self.sizes.padded_vocab)
        if self.candidates.ids is None:
            # Each rank selects its own likeliest tokens. Under TP the ranks gather the log-probabilities and then
            # the ids, and concatenate the ids.
            selection = _FOUND_BYTES + (8 + (4 + 2 * 8) * tp if tp > 1 else 0)
            # At the end, results at predicted tokens are copied to the positions of all tokens.
            return truncate(
                _FOUND_BYTES * numbers + np.maximum(chunk + selection * in_chunk, _FOUND_BYTES * numbers)
            )
        # Each candidate of a chunk has a mask of the ids on this rank (1 byte), a local id (8), and two
        # log-probabilities (8).
        computed = 4 * numbers + np.maximum(chunk + 17 * in_chunk, _DIVERGENCE_BYTES * numbers - 8 * numbers)
        return truncate(computed + _GIVEN_BYTES * numbers)

    def backward(self, tokens: Real) -> Ints:
        """Compute the bytes of one logit chunk in the backward pass.

        A small micro-batch keeps its logits. The peak is at one of two moments. At the first moment,
        log-probabilities turn into the gradient of the logits. At the second moment, this gradient is held together
        with the gradient of the hidden states, or with the head's gradient before it is added to the sum. A frozen
        head has no gradient.
        """
        if self._scalar:
            return truncate(2 * self._float32 * tokens * self.sizes.shape.hidden_size)
        chunk = self._chunk(tokens)
        logits = tokens * self.sizes.padded_vocab
        keeps = self.sizes.keeps_logits(tokens, cpu=self.cpu)
        kept = np.where(keeps, 4 * logits, 0)
        if self.cpu:
            computed = np.where(chunk == logits, 4 + self._narrow, self._log_softmax)
            if self.sizes.options.logit_cap is not None:
                # The slope of the cap, the logits and, under TP, the exponentials of the logits.
                computed = np.maximum(computed, 4 + (8 if self.sizes.tp > 1 else 4))
            hidden = self.sizes.shape.hidden_size
            product = self.element_bytes * hidden * chunk / self.sizes.padded_vocab
            if self.sizes.trains_head:
                product = np.maximum(
                    product, added_bytes(self.sizes.padded_vocab * hidden, self.element_bytes)
                )
            inside = np.maximum(computed * chunk, self.element_bytes * chunk + product)
        else:  # Logits, and their gradient. In float32 the gradient overwrites the logits.
            inside = np.where(keeps, self._narrow, 4 + self._narrow) * chunk
        if self.candidates is None:
            return truncate(kept + inside)
        numbers = self.candidates.count * tokens
        # Gradients of log-probabilities are held twice: before and after the division by the temperature.
        inside = np.maximum(inside + 2 * 4 * numbers, _LOSS_BYTES * numbers)
        return truncate(kept + inside + _GIVEN_BYTES * numbers)

    @property
    def _log_softmax(self) -> int:
        """Bytes per logit. They hold the matmul's output and its float32 cast or, under TP, this cast and its
        exponential.

        A GPU writes the matmul's output in float32. It computes only sums of the softmax, unless it selects tokens.
        """
        selects = self.candidates is not None and self.candidates.ids is None
        exponential = 8 if self.sizes.tp > 1 and (self.cpu or selects) else 0
        return max(4 + (self._narrow if self.cpu else 0), exponential)

    @property
    def _narrow(self) -> int:
        """Bytes of an element that is held together with its float32 cast. 0 if the element is float32 itself."""
        return self.element_bytes if self.element_bytes < 4 else 0

    @property
    def _float32(self) -> int:
        """Bytes of a float32 cast that is held together with its element. 0 if the element is float32 itself."""
        return 4 if self.element_bytes < 4 else 0

    @property
    def _scalar(self) -> bool:
        return self.sizes.head == "scalar"

    def _chunk(self, tokens: Real) -> Real:
        rows, _ = self.sizes.count_logit_chunks(tokens, cpu=self.cpu)
        return rows * self.sizes.padded_vocab
