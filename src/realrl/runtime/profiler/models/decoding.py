"""Generation: what prompts take, and then each turn."""

from collections.abc import Mapping
from statistics import median

import torch
from torch import Tensor

from realrl.data.batch import Ragged
from realrl.engine.generation.generate import Continuation, Noise, generate
from realrl.engine.model import Model
from realrl.model.cache import KVCache
from realrl.model.packing import Packing
from realrl.planner.profile.profile import LayerKind
from realrl.recipe.settings import GenerationConfig
from realrl.runtime.profiler.models.passes import first_extra, typical
from realrl.runtime.profiler.points.clock import Clock, Moment
from realrl.runtime.profiler.points.records import records
from realrl.runtime.profiler.points.watch import Watch

TURNS = 8
"""Tokens that are decoded at a time."""
_NOISE = Noise(0, 0)
_NO_ENDS = (-1,)
"""Never drawn, so that nothing ends early."""


class Decoding:
    """A language model that generates."""

    def __init__(self, model: Model, sampling: GenerationConfig, clock: Clock) -> None:
        self._model, self._sampling, self._clock = model, sampling, clock
        self._watch = Watch(model, clock)

    def start(self, tokens: int, context: int) -> Mapping[LayerKind, float]:
        """Seconds until `tokens // context` prompts of `context` tokens each have their first new token."""
        clock, sampling = self._clock, self._limited(1)
        vocabulary, device = self._model.shape.vocab_size, self._model.device
        batch = records([2 * context] * (tokens // context), vocabulary, device)
        self._watch.clear()
        begin = clock.now()
        generate(
            self._model,
            batch,
            "prompts",
            sampling=sampling,
            ends=_NO_ENDS,
            noise=_NOISE,
            budget=2 * tokens,
        )
        end = clock.now()
        ((*marks,),) = self._watch.passes
        before, *layers, after = clock.between(begin, *marks, end)
        return {"start": before + first_extra(layers) + after, "prefill": typical(layers)}

    def turn(self, rows: int, context: int) -> Mapping[LayerKind, float]:
        """Seconds of a token more for each of so many sequences, which have `context` tokens each, about."""
        clock = self._clock
        prompts = Ragged(torch.zeros(rows, dtype=torch.int64), (1,) * rows)
        ids = torch.arange(rows, device=self._model.device)
        cached = max(1, context - TURNS // 2)
        running = _Cached(self._model, prompts, ids, self._limited(TURNS + 1), cached, clock)
        self._watch.clear()
        for _ in running.run():
            pass
        passes = self._watch.passes
        layers = [clock.between(*marks) for marks in passes]
        # Before the first pass come tokens that are drawn from what the cache is said to hold.
        gaps = [
            clock.between(before[-1], drawn, after[0])
            for before, drawn, after in zip(passes, running.drawn[1:], passes[1:], strict=False)
        ]
        return {
            "decode": median(sum(times) / len(times) for times in layers),
            "sample": median(sample for sample, _ in gaps),
            "turn": median(turn for _, turn in gaps),
        }

    def _limited(self, tokens: int) -> GenerationConfig:
        # Whether the end of a sequence is forbidden costs time at each token.
        always = self._sampling.min_new_tokens > self._sampling.max_new_tokens // 2
        limits = {"max_new_tokens": tokens, "min_new_tokens": tokens if always else 0}
        return self._sampling.model_copy(update=limits)


class _Cached(Continuation):
    """A continuation of sequences that are in the cache already."""

    def __init__(
        self,
        model: Model,
        prompts: Ragged,
        ids: Tensor,
        sampling: GenerationConfig,
        cached: int,
        clock: Clock,
    ) -> None:
        super().__init__(model, prompts, ids, sampling, _NO_ENDS, _NOISE)
        self._cached, self._clock = cached, clock
        self.drawn: list[Moment] = []
        """When the tokens of each turn had been drawn."""

    def _record(self, chosen: Tensor, slots: Tensor, position: int) -> None:
        self.drawn.append(self._clock.now())
        super()._record(chosen, slots, position)

    def prefill(self) -> tuple[Tensor, KVCache]:
        """A cache that claims to hold the sequences."""
        model, rows = self.model, len(self.prompts)
        cache = KVCache(
            layers=len(model.shard.layers),
            kv_heads=model.transformer.cache_heads,
            head_dim=model.shape.head_dim,
            rows=rows,
            max_tokens=self._cached + self.sampling.max_new_tokens,
            dtype=model.dtype,
            device=model.device,
        )
        cache.start(Packing.of([self._cached] * rows, model.device))
        hidden = torch.ones(rows, model.shape.hidden_size, dtype=cache.k.dtype, device=model.device)
        return hidden, cache
