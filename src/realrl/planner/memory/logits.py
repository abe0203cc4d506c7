"""Memory of logits and derived tensors on one rank."""

from dataclasses import dataclass

import numpy as np

from realrl.dataflow.call import Candidates
from realrl.planner.memory.layer import added_bytes
from realrl.planner.workload.shard_sizes import LocalSizes
from realrl.program.arrays import Ints, Real, truncate

_SAMPLED_BYTES = 12
"""Bytes per logit of a sampled token without top-k and top-p (`engine.generation.sampler`).

Logits, log-probabilities and probabilities in float32; on a GPU, probabilities that top-p restricts or that are
padded to whole blocks, too."""
_FOUND_BYTES = 12
"""Bytes per likeliest token: its id in int64, and its log-probability in float32."""
_GIVEN_BYTES = 16
"""Bytes per given token: ids in int64 at all tokens and, beside each token's own, at predicted ones."""
_DIVERGENCE_BYTES = 32
"""Bytes per given token of a Jensen-Shannon divergence, without gradient: eight float32 numbers."""
_LOSS_BYTES = 60
"""The same with what is kept for the backward pass: fifteen numbers."""


@dataclass(frozen=True)
class Logits:
    """Memory of the output head, in bytes; tokens are those of a micro-batch."""

    sizes: LocalSizes
    element_bytes: int
    cpu: bool
    candidates: Candidates | None = None
    """Those of the call."""

    def sampled(self, rows: Real) -> Ints:
        """Compute the bytes of the next tokens' logits, which every TP rank holds in full."""
        each = _SAMPLED_BYTES + (0 if self.cpu else 4)
        return truncate(0 if self._scalar else each * rows * self.sizes.shape.vocab_size)

    def scored(self, tokens: Real) -> Ints:
        """Compute the bytes of one logit chunk in inference; for a scalar head, of hidden states cast to
        float32."""
        if self._scalar:
            return truncate(self._float32 * tokens * self.sizes.shape.hidden_size)
        chunk = self._log_softmax * self._chunk(tokens)
        if self.candidates is None:
            return truncate(chunk)
        numbers, tp = self.candidates.count * tokens, self.sizes.tp
        in_chunk = numbers * self._chunk(tokens) / (tokens * self.sizes.padded_vocab)
        if self.candidates.ids is None:
            # Of all TP ranks log-probabilities are gathered, then ids, which are put side by side.
            selection = _FOUND_BYTES + (8 + (4 + 2 * 8) * tp if tp > 1 else 0)
            # At last they are found for predicted tokens, and copied to the places of all tokens.
            return truncate(
                _FOUND_BYTES * numbers + np.maximum(chunk + selection * in_chunk, _FOUND_BYTES * numbers)
            )
        # In a chunk: which are on this rank, their ids there, and log-probabilities twice.
        computed = 4 * numbers + np.maximum(chunk + 17 * in_chunk, _DIVERGENCE_BYTES * numbers - 8 * numbers)
        return truncate(computed + _GIVEN_BYTES * numbers)

    def backward(self, tokens: Real) -> Ints:
        """Compute the bytes of one logit chunk in the backward pass.

        Up to a number of log-probabilities, a micro-batch keeps them. The peak is either at the log-probabilities,
        which turn into the gradient of logits; or at that gradient, beside that of hidden states, or the head's
        where it is computed before it is added to those of other passes. A frozen head has none.
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
                # Beside the slope of the cap: logits, of which several ranks also hold the exponential.
                computed = np.maximum(computed, 4 + (8 if self.sizes.tp > 1 else 4))
            hidden = self.sizes.shape.hidden_size
            product = self.element_bytes * hidden * chunk / self.sizes.padded_vocab
            if self.sizes.trains_head:
                product = np.maximum(
                    product, added_bytes(self.sizes.padded_vocab * hidden, self.element_bytes)
                )
            inside = np.maximum(computed * chunk, self.element_bytes * chunk + product)
        else:  # logits, and their gradient, which in float32 takes their place
            inside = np.where(keeps, self._narrow, 4 + self._narrow) * chunk
        if self.candidates is None:
            return truncate(kept + inside)
        numbers = self.candidates.count * tokens
        # The gradient of log-probabilities comes twice: as it is, and divided by the temperature.
        inside = np.maximum(inside + 2 * 4 * numbers, _LOSS_BYTES * numbers)
        return truncate(kept + inside + _GIVEN_BYTES * numbers)

    @property
    def _log_softmax(self) -> int:
        """Bytes per logit: the matmul output and its float32 cast, or that cast and its exponential under TP.

        On a GPU products are float32, and of their softmax only sums are kept, but where tokens are selected by it.
        """
        selects = self.candidates is not None and self.candidates.ids is None
        exponential = 8 if self.sizes.tp > 1 and (self.cpu or selects) else 0
        return max(4 + (self._narrow if self.cpu else 0), exponential)

    @property
    def _narrow(self) -> int:
        """Bytes of an element that is held beside its float32 cast."""
        return self.element_bytes if self.element_bytes < 4 else 0

    @property
    def _float32(self) -> int:
        """Bytes of a float32 cast that is held beside the element."""
        return 4 if self.element_bytes < 4 else 0

    @property
    def _scalar(self) -> bool:
        return self.sizes.head == "scalar"

    def _chunk(self, tokens: Real) -> Real:
        """Logits of a chunk."""
        rows, _ = self.sizes.count_logit_chunks(tokens, cpu=self.cpu)
        return rows * self.sizes.padded_vocab
