"""Measure the times of generation: prefill and decode steps."""

from collections.abc import Mapping, Sequence
from statistics import median

import torch
from torch import Tensor

from realrl.data.batch import Ragged
from realrl.engine.generation.decode_batch import DecodeBatch, GenerateCall
from realrl.engine.generation.generator import generate, list_rows
from realrl.engine.generation.sampling_noise import SamplingSeed
from realrl.engine.generation.scheduler import RowPrefill
from realrl.engine.model import Model
from realrl.layout.kv_blocks import BLOCK_TOKENS
from realrl.planner.profile.profile import LayerKind
from realrl.recipe.generation import GenerationConfig
from realrl.runtime.profiler.passes import LayerMix, LayerTimer, make_records
from realrl.runtime.profiler.points import Clock, Moment

DECODE_STEPS = 8
"""Number of tokens decoded in one measurement."""
_SEED = SamplingSeed(0, 0)


class Decoding:
    """Measures generation by a language model."""

    def __init__(
        self, model: Model, sampling: GenerationConfig, clock: Clock, window_share: float | None = None
    ) -> None:
        """For `window_share`, see `Passes`."""
        self._model = model
        self._sampling = sampling
        self._clock = clock
        self._layers = LayerMix.of(model.shape, window_share)
        self._layer_timer = LayerTimer(model, clock)

    def start(self, tokens: int, context: int) -> Mapping[LayerKind, float]:
        """Measure the seconds until `tokens // context` prompts of `context` tokens have their first new token.

        `prefill`: seconds of one layer in prefill. `start`: seconds outside the layers, in prefill and in the
        decode step that follows.
        """
        clock = self._clock
        sampling = self._limited(1)
        vocabulary = self._model.shape.vocab_size
        rows = tokens // context
        batch = make_records([2 * context] * rows, vocabulary, self._model.device)
        self._layer_timer.clear()
        begin = clock.now()
        generate(
            self._model,
            batch,
            "prompts",
            sampling=sampling,
            stop_token_ids=_choose_ends(sampling),
            seed=_SEED,
            kv_capacity=rows * (context + 2 * BLOCK_TOKENS),
        )
        end = clock.now()
        # Prefill ends with the keys and values of the last layer, which are computed between these two passes.
        (*prefill, last), (first, *_, token) = self._layer_timer.passes
        before, *layers, between, _, after = clock.between(begin, *prefill, last, first, token, end)
        return {
            "start": before + self._layers.first_extra(layers) + between + after,
            "prefill": self._layers.typical(layers),
        }

    def measure_step(self, rows: int, context: int) -> Mapping[LayerKind, float]:
        """Measure the seconds of one decode step of `rows` sequences with about `context` tokens each."""
        clock = self._clock
        cached = max(1, context - DECODE_STEPS // 2)
        prompts = Ragged(torch.zeros(rows * cached, dtype=torch.int64), (cached,) * rows)
        steps = DECODE_STEPS + 1
        sampling = self._limited(steps)
        call = GenerateCall(
            self._model,
            list_rows([[i] for i in range(rows)], prompts),
            sampling=sampling,
            stop_token_ids=_choose_ends(sampling),
            seed=_SEED,
            kv_capacity=rows * (cached + steps + 2 * BLOCK_TOKENS),
            pass_tokens=rows * cached,
        )
        call.memory.cache.k.zero_()  # uninitialised memory may hold denormal numbers, which are slow
        call.memory.cache.v.zero_()
        running = _CachedDecodeBatch(call, clock)
        self._layer_timer.clear()
        for _ in running.run():
            pass
        passes, sampled = self._layer_timer.passes, running.sampled
        if call.on_gpu:
            # The second step was captured in a CUDA graph. Its recorded moments are those of the last replay.
            passes, sampled = passes[-1:], sampled[-2:]
        else:
            # The first step also admits rows, so it is not typical.
            passes = passes[1:]
        layers = [clock.between(*marks) for marks in passes]
        gaps = [
            clock.between(before, marks[0]) + clock.between(marks[-1], after)
            for before, marks, after in zip(sampled, passes, sampled[1:], strict=False)
        ]
        return {
            "decode": median(self._layers.average(times) for times in layers),
            "sample": median(sample for _, sample in gaps),
            "decode_overhead": median(rest for rest, _ in gaps),
        }

    def _limited(self, tokens: int) -> GenerationConfig:
        # Keep this setting, because forbidding the end of a sequence costs time for each token.
        always = self._sampling.min_new_tokens > self._sampling.max_new_tokens // 2
        limits = {"max_new_tokens": tokens, "min_new_tokens": tokens if always else 0}
        return self._sampling.model_copy(update=limits)


def _choose_ends(sampling: GenerationConfig) -> tuple[int, ...]:
    """Choose stop tokens so that no sequence ends: a token that is forbidden, or no token."""
    return (0,) if sampling.min_new_tokens else ()


class _CachedDecodeBatch(DecodeBatch):
    """Decode batch that assumes that its sequences are already in the KV cache."""

    def __init__(self, call: GenerateCall, clock: Clock) -> None:
        super().__init__(call, 0)
        self._clock = clock
        self.sampled: list[Moment] = []
        """Moments at which sampling ended in each decode step."""

    def _prefill(self, prefills: Sequence[RowPrefill]) -> None:
        """Compute nothing, because the cache counts as filled."""

    def _decode(self) -> Tensor:
        tokens = super()._decode()
        self.sampled.append(self._clock.now())
        return tokens
