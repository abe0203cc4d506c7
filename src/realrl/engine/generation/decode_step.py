"""Decode step of one stage: from tokens or hidden states to hidden states, or to sampled tokens."""

from torch import Tensor

from realrl.engine.generation.row_buffers import BufferedRows
from realrl.engine.generation.sampler import Sampler
from realrl.engine.model import Model
from realrl.model.cache import PagedCache
from realrl.model.decode_weights import DecodeWeights


class DecodeStep:
    """A stage's part of a decode step, sampling and bookkeeping included.

    Shapes depend on the number of rows alone, and nothing waits for the device.
    """

    def __init__(self, model: Model, weights: DecodeWeights, cache: PagedCache, sampler: Sampler) -> None:
        self._model = model
        self._weights = weights
        self._cache = cache
        self._sampler = sampler

    def run(self, rows: BufferedRows, hidden: Tensor | None) -> Tensor:
        """Run the step. `hidden`: received from the stage before, [B, H]; None on the first stage.

        Returns hidden states [B, H]; on the last stage tokens [B], which are recorded already.
        """
        transformer = self._model.transformer
        x = rows.tokens if hidden is None else hidden
        x = transformer.decode(x, self._weights, self._cache, rows.cached)
        if not self._model.shard.last:
            return x
        noise = rows.noise.index_select(0, rows.step).squeeze(0)
        logits = transformer.compute_logits(x, self._weights)
        tokens, logprobs = self._sampler.sample(logits, rows.cached.own_lengths, noise)
        rows.advance(tokens, logprobs)
        return tokens
