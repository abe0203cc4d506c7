"""State of a generate call that its decode batches share."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from realrl.data.batch import Ragged
from realrl.engine.generation.routed_experts import RoutedExperts
from realrl.engine.generation.sampler import Sampler
from realrl.engine.generation.sampling import SamplingNoise, SamplingSeed
from realrl.engine.generation.scheduler import DecodeRow, Scheduler
from realrl.engine.model import Model
from realrl.layout.kv_blocks import (
    count_prefill_tokens,
    count_prompt_blocks,
    count_steps_per_look,
    size_cache,
)
from realrl.model.cache import PagedCache
from realrl.model.decode_weights import DecodeWeights
from realrl.recipe.settings import GenerationConfig
from realrl.recipe.stop_strings import StopStrings


@dataclass(frozen=True, eq=False, kw_only=True)
class GenerateCall:
    """Rows, cache and sampling of a generate call on one rank."""

    model: Model
    weights: DecodeWeights
    """Matrices of decode steps."""
    prompts: Ragged
    """Prompts by number, on the CPU."""
    keys: Sequence[int]
    """Keys of the sampling noise, by number of the row."""
    noise: SamplingNoise
    sampler: Sampler
    stop_token_ids: frozenset[int]
    stop: StopStrings | None
    new_tokens: int
    """Most tokens of a continuation."""
    cache: PagedCache
    scheduler: Scheduler
    on_gpu: bool
    """Whether the host runs ahead of the device: turns have several steps, which are graphs of few sizes."""
    steps: int
    """Decode steps of a turn."""
    batches: int
    """Decode batches: one per stage of the pipeline."""
    rows: int
    """Most rows of a decode batch."""
    experts: RoutedExperts | None
    """Experts of rows that have left the cache, where they are recorded."""

    @classmethod
    def of(
        cls,
        model: Model,
        rows: Sequence[DecodeRow],
        prompts: Ragged,
        *,
        ids: Sequence[int],
        sampling: GenerationConfig,
        stop_token_ids: tuple[int, ...],
        seed: SamplingSeed,
        kv_capacity: int,
        stop: StopStrings | None = None,
        pass_tokens: int | None = None,
        record_experts: bool = False,
    ) -> "GenerateCall":
        """Allocate what the continuation of `rows` takes.

        `ids` are those of the items, by number of the row; `kv_capacity` the tokens that the cache holds for each
        decode batch, of which a pipeline has one per stage; `pass_tokens` those of a forward pass that prefills, by
        default what suits the device. With `record_experts`, those of a mixture are kept as rows leave the cache.
        """
        mixture = model.shape.mixture if record_experts else None
        assert mixture is not None or not record_experts, "only mixtures have experts"
        batches = model.groups.pipeline.size
        size = size_cache(
            batches * kv_capacity,
            prompt_blocks=sum(map(count_prompt_blocks, prompts.lengths)),
            longest_prompt=max(prompts.lengths),
            rows=len(rows),
            new_tokens=sampling.max_new_tokens,
        )
        cpu = model.device.type == "cpu"
        steps = count_steps_per_look(cpu=cpu)
        noise = SamplingNoise(seed)
        cache = PagedCache(
            size,
            layers=len(model.shard.layers),
            kv_heads=model.transformer.cache_kv_heads,
            head_dim=model.shape.head_dim,
            dtype=model.dtype,
            device=model.device,
            experts=0 if mixture is None else mixture.per_token,
        )
        return cls(
            model=model,
            weights=model.transformer.prepare_decoding(),
            prompts=prompts.to(torch.device("cpu")),
            keys=noise.make_keys(torch.tensor(ids)).tolist(),
            noise=noise,
            sampler=Sampler(
                sampling, temperature=model.temperature, stop_token_ids=stop_token_ids, device=model.device
            ),
            stop_token_ids=frozenset(stop_token_ids),
            stop=stop,
            new_tokens=sampling.max_new_tokens,
            cache=cache,
            scheduler=Scheduler(
                rows,
                size,
                batches=batches,
                new_tokens=sampling.max_new_tokens,
                steps=steps,
                prefill_tokens=pass_tokens or count_prefill_tokens(cpu=cpu),
            ),
            on_gpu=not cpu,
            steps=steps,
            batches=batches,
            rows=-(-size.rows // batches),
            experts=None if cache.experts is None else RoutedExperts(cache.experts),
        )
