"""Times of generation: prefill, then decode steps."""

from collections.abc import Mapping
from statistics import median

import torch
from torch import Tensor

from realrl.data.batch import Ragged
from realrl.engine.generation.decode_batch import DecodeBatch
from realrl.engine.generation.generator import generate
from realrl.engine.generation.prompts import DistinctPrompts
from realrl.engine.generation.sampling import SamplingSeed
from realrl.engine.model import Model
from realrl.model.cache import KVCache
from realrl.model.packing import Packing
from realrl.planner.profile.profile import LayerKind
from realrl.recipe.settings import GenerationConfig
from realrl.runtime.profiler.models.passes import find_first_extra, find_typical
from realrl.runtime.profiler.points.clock import Clock, Moment
from realrl.runtime.profiler.points.layer_timer import LayerTimer
from realrl.runtime.profiler.points.records import make_records

DECODE_STEPS = 8
"""Number of tokens decoded in one measurement."""
_SEED = SamplingSeed(0, 0)
_NO_ENDS = (-1,)
"""Token that is never sampled, so that no sequence ends early."""


class Decoding:
    """Generation by a language model, measured."""

    def __init__(self, model: Model, sampling: GenerationConfig, clock: Clock) -> None:
        self._model = model
        self._sampling = sampling
        self._clock = clock
        self._layer_timer = LayerTimer(model, clock)

    def start(self, tokens: int, context: int) -> Mapping[LayerKind, float]:
        """Measure the seconds until `tokens // context` prompts of `context` tokens have their first new token."""
        clock = self._clock
        sampling = self._limited(1)
        vocabulary = self._model.shape.vocab_size
        device = self._model.device
        batch = make_records([2 * context] * (tokens // context), vocabulary, device)
        self._layer_timer.clear()
        begin = clock.now()
        generate(
            self._model,
            batch,
            "prompts",
            sampling=sampling,
            stop_token_ids=_NO_ENDS,
            seed=_SEED,
            kv_capacity=2 * tokens,
        )
        end = clock.now()
        ((*marks,),) = self._layer_timer.passes
        before, *layers, after = clock.between(begin, *marks, end)
        return {"start": before + find_first_extra(layers) + after, "prefill": find_typical(layers)}

    def measure_step(self, rows: int, context: int) -> Mapping[LayerKind, float]:
        """Measure the seconds of one decode step of `rows` sequences, which have about `context` tokens each."""
        clock = self._clock
        prompts = DistinctPrompts(
            Ragged(torch.zeros(rows, dtype=torch.int64), (1,) * rows), tuple(range(rows))
        )
        ids = torch.arange(rows, device=self._model.device)
        cached = max(1, context - DECODE_STEPS // 2)
        running = _CachedDecodeBatch(
            self._model, prompts, ids, self._limited(DECODE_STEPS + 1), cached, clock
        )
        self._layer_timer.clear()
        for _ in running.run():
            pass
        passes = self._layer_timer.passes
        layers = [clock.between(*marks) for marks in passes]
        # The first pass has no gap before it: its tokens are sampled from the pretended prefill.
        gaps = [
            clock.between(before[-1], sampled, after[0])
            for before, sampled, after in zip(passes, running.sampled[1:], passes[1:], strict=False)
        ]
        return {
            "decode": median(sum(times) / len(times) for times in layers),
            "sample": median(sample for sample, _ in gaps),
            "decode_overhead": median(rest for _, rest in gaps),
        }

    def _limited(self, tokens: int) -> GenerationConfig:
        # Whether the end of a sequence is forbidden costs time at each token.
        always = self._sampling.min_new_tokens > self._sampling.max_new_tokens // 2
        limits = {"max_new_tokens": tokens, "min_new_tokens": tokens if always else 0}
        return self._sampling.model_copy(update=limits)


class _CachedDecodeBatch(DecodeBatch):
    """Decode batch of sequences that are in the KV cache already."""

    def __init__(
        self,
        model: Model,
        prompts: DistinctPrompts,
        ids: Tensor,
        sampling: GenerationConfig,
        cached: int,
        clock: Clock,
    ) -> None:
        super().__init__(model, prompts, ids, sampling=sampling, stop_token_ids=_NO_ENDS, seed=_SEED)
        self._cached = cached
        self._clock = clock
        self.sampled: list[Moment] = []
        """Moments at which the tokens of each decode step had been sampled."""

    def _record(self, tokens: Tensor, rows: Tensor, position: int) -> None:
        self.sampled.append(self._clock.now())
        super()._record(tokens, rows, position)

    def prefill(self) -> tuple[Tensor, KVCache]:
        """Make a KV cache that claims to hold the sequences."""
        model = self.model
        rows = len(self.prompts)
        cache = KVCache(
            layers=len(model.shard.layers),
            kv_heads=model.transformer.cache_kv_heads,
            head_dim=model.shape.head_dim,
            rows=rows,
            max_tokens=self._cached + self.sampling.max_new_tokens,
            dtype=model.dtype,
            device=model.device,
        )
        cache.start(Packing.of([self._cached] * rows, model.device))
        hidden = torch.ones(rows, model.shape.hidden_size, dtype=cache.k.dtype, device=model.device)
        return hidden, cache
