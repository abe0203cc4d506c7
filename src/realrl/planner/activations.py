"""Bytes of what calls compute on the way, on one rank."""

from dataclasses import dataclass

from realrl.plan.placement import Strategy
from realrl.planner.sizes import LocalSizes

GPU_LOGITS, CPU_LOGITS = 1 << 26, 1 << 20
"""Logits that are computed at a time (`model.logprobs`)."""
SCORED_LOGIT_BYTES = 10
"""Of one of them: the product in 2 bytes, float32, and its exponential for the sum."""
LEARNT_LOGIT_BYTES = 14
"""With its gradient: log-probability and gradient in float32, the exponential or what is multiplied, 2 bytes."""
SAMPLED_LOGIT_BYTES = 28
"""Of a token to be drawn: logits, scaled, log-probabilities and probabilities in float32, their sum in float64."""


@dataclass(frozen=True)
class Activations:
    """A model's activations under a strategy. Tokens are those of a micro-batch."""

    sizes: LocalSizes
    strategy: Strategy
    element_bytes: int
    cpu: bool = False

    def working(self, tokens: float) -> int:
        """Of one layer at a time, without gradients, with the rotation's sines and cosines of all tokens."""
        s, hidden = self.sizes, self.sizes.shape.hidden_size
        widest = max(3 * (s.queries + s.keys), 3 * s.inner)
        return self._bytes(tokens * (3 * hidden + widest + 2 * (s.queries + s.keys)))

    def saved(self, tokens: float, layers: int, flying: int, *, recompute: bool) -> int:
        """Kept for the backward pass, of `flying` micro-batches, and what the one under way needs besides.

        Per layer two inputs of norms and their outputs; queries, keys, values and attention's output; gate, up
        and their product. With recomputation only the input of each layer, and all of it for one layer.
        """
        s, hidden = self.sizes, self.sizes.shape.hidden_size
        stream = hidden / (s.tp if self.strategy.sequence_parallel else 1)
        layer = 2 * stream + 2 * hidden + 2 * s.queries + 2 * s.keys + 3 * s.inner
        rotation = 2 * (s.queries + s.keys)
        kept = (
            flying * (layers * stream + rotation) + layer
            if recompute
            else flying * (layers * layer + rotation)
        )
        # A gradient for each value of the layer that goes backward.
        return self._bytes(tokens * kept) + self.working(tokens)

    def cache(self, rows: int, room: int, layers: int) -> int:
        """Keys and values of one continuation, whose rows all have room for the longest."""
        return self._bytes(2 * layers * rows * room * self.sizes.cached)

    def sampled(self, rows: int) -> int:
        """Logits of the next tokens, which every tensor rank has whole."""
        return 0 if self._scalar else SAMPLED_LOGIT_BYTES * rows * self.sizes.shape.vocab_size

    def scored(self, tokens: float) -> int:
        """Logits of one chunk in inference."""
        return 0 if self._scalar else int(SCORED_LOGIT_BYTES * self._chunk(tokens))

    def learnt(self, tokens: float) -> int:
        """Logits of one chunk in training, and the float32 gradient of the head."""
        if self._scalar:
            return 0
        table = 4 * self.sizes.vocabulary * self.sizes.shape.hidden_size
        return int(LEARNT_LOGIT_BYTES * self._chunk(tokens)) + table

    @property
    def _scalar(self) -> bool:
        return self.sizes.head == "scalar"

    def _chunk(self, tokens: float) -> float:
        return min(tokens * self.sizes.vocabulary, CPU_LOGITS if self.cpu else GPU_LOGITS)

    def _bytes(self, elements: float) -> int:
        return int(elements * self.element_bytes)
