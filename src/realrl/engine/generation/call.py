"""State of a generate call that its decode batches share."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from realrl.data.batch import Ragged
from realrl.engine.generation.decode_memory import (
    DecodeKind,
    DecodeMemory,
    DecodeSize,
    KeptDecoding,
    count_computed_rows,
    is_gpu,
    list_addresses,
)
from realrl.engine.generation.routed_experts import RoutedExperts
from realrl.engine.generation.sampling import SamplingNoise, SamplingSeed
from realrl.engine.generation.scheduler import DecodeRow, Scheduler
from realrl.engine.model import Model
from realrl.layout.kv_blocks import (
    count_prefill_tokens,
    count_prompt_blocks,
    count_steps_per_look,
    size_cache,
)
from realrl.recipe.settings import GenerationConfig
from realrl.recipe.stop_strings import StopStrings


@dataclass(frozen=True, eq=False, kw_only=True)
class GenerateCall:
    """Rows, cache and sampling of a generate call on one rank."""

    model: Model
    memory: DecodeMemory
    prompts: Ragged
    """Prompts by number, on the host."""
    keys: Sequence[int]
    """Keys of the sampling noise, by number of the row."""
    noise: SamplingNoise
    stop_token_ids: frozenset[int]
    stop: StopStrings | None
    new_tokens: int
    """Most tokens of a continuation."""
    scheduler: Scheduler
    on_gpu: bool
    """See `is_gpu`."""
    batches: int
    """Decode batches: one per stage of the pipeline."""
    experts: RoutedExperts | None
    """Experts of rows that have left the cache, if they are recorded."""

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
        kept: KeptDecoding | None = None,
    ) -> "GenerateCall":
        """Prepare the continuation of `rows`: allocate memory, or take what earlier calls have left in `kept`.

        `ids` are the items' ids, by number of the row. `kv_capacity` is the number of tokens that the cache holds
        for each decode batch. `pass_tokens` limits a prefill pass; by default it suits the device. With
        `record_experts`, a mixture's experts are kept as rows leave the cache.
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
        on_gpu = is_gpu(model.device)
        noise = SamplingNoise(seed)
        kind = DecodeKind(
            sampling,
            stop_token_ids,
            experts=0 if mixture is None else mixture.per_token,
            batches=batches,
            on_gpu=on_gpu,
            addresses=list_addresses(model),
        )
        most = count_computed_rows(-(-size.rows // batches), on_gpu=on_gpu)
        needed = DecodeSize(size.blocks, most, max(prompts.lengths))
        memory = (kept or KeptDecoding()).take(model, kind, needed)
        experts = memory.cache.experts
        return cls(
            model=model,
            memory=memory,
            prompts=prompts.to(torch.device("cpu")),
            keys=noise.make_keys(torch.tensor(ids)).tolist(),
            noise=noise,
            stop_token_ids=frozenset(stop_token_ids),
            stop=stop,
            new_tokens=sampling.max_new_tokens,
            scheduler=Scheduler(
                rows,
                size,
                batches=batches,
                new_tokens=sampling.max_new_tokens,
                steps=count_steps_per_look(cpu=not on_gpu),
                prefill_tokens=pass_tokens or count_prefill_tokens(cpu=not on_gpu),
            ),
            on_gpu=on_gpu,
            batches=batches,
            experts=None if experts is None else RoutedExperts(experts),
        )
