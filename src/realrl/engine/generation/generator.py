"""Generation: prompts in, sequences with their log-probabilities out."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from realrl.data.batch import Batch, Ragged
from realrl.engine.generation.decode_batch import DecodeBatch
from realrl.engine.generation.prompts import DistinctPrompts, group_samples, split_into_decode_batches
from realrl.engine.generation.sampling import SamplingSeed
from realrl.engine.model import Model
from realrl.recipe.settings import GenerationConfig


@torch.no_grad()
def generate(
    model: Model,
    batch: Batch,
    prompts: str,
    *,
    sampling: GenerationConfig,
    stop_token_ids: tuple[int, ...],
    seed: SamplingSeed,
    kv_capacity: int,
    samples: int = 1,
    after_step: Callable[[], None] = lambda: None,
) -> Batch:
    """Continue the rows of field `prompts`, with at most `kv_capacity` tokens in the KV cache at a time.

    Adds sequences (prompt and continuation, end-of-sequence included), logprobs (aligned with them, 0 on the
    prompt), prompt_length, and finished (1.0 where the sequence ends with one of `stop_token_ids`). Items are
    identified by their ids: the same ids, seed and parameters give the same tokens whatever else is in the batch.
    Items i * `samples` to (i + 1) * `samples` - 1 are samples of one prompt: those in one decode batch share its
    prefill and its part of the KV cache.
    `after_step` is called after each decode step. NotFiniteLogitsError if the model's logits are not finite.
    """
    given = batch[prompts]
    batches = split_into_decode_batches(
        model,
        given,
        group_samples(batch.ids, given, samples),
        new_tokens=sampling.max_new_tokens,
        kv_capacity=kv_capacity,
    )
    chunks = [[position for group in groups for position in group] for groups in batches]
    decode_batches = [
        DecodeBatch(
            model,
            DistinctPrompts.of(given, groups),
            torch.tensor([batch.ids[i] for i in positions], dtype=torch.int64, device=model.device),
            sampling=sampling,
            stop_token_ids=stop_token_ids,
            seed=seed,
        )
        for groups, positions in zip(batches, chunks, strict=True)
    ]
    _interleave(decode_batches, after_step, at_once=model.groups.pipeline.size)
    model.pipeline.wait_sends()
    if not model.shard.last:
        return batch
    rows: list[tuple[Tensor, Tensor, bool] | None] = [None] * len(batch)
    for positions, decode_batch in zip(chunks, decode_batches, strict=True):
        for position, row in zip(positions, decode_batch.results(), strict=True):
            rows[position] = row
    results = [row for row in rows if row is not None]
    return batch.with_fields(
        sequences=Ragged.of([tokens for tokens, _, _ in results], dtype=torch.int64),
        logprobs=Ragged.of([logprobs for _, logprobs, _ in results], dtype=torch.float32),
        prompt_length=Ragged.scalars(torch.tensor(given.lengths, dtype=torch.int64)),
        finished=Ragged.scalars(torch.tensor([float(f) for _, _, f in results], dtype=torch.float32)),
    )


def _interleave(
    decode_batches: Sequence[DecodeBatch], after_step: Callable[[], None], *, at_once: int
) -> None:
    """Advance several decode batches step by step, `at_once` at a time.

    While one is on another stage of the pipeline, this stage works on the next. Every stage takes the same steps in
    the same order.
    """
    waiting = deque(decode_batches)
    active = deque[Iterator[None]]()
    while waiting or active:
        while waiting and len(active) < at_once:
            waiting[0].post_prompt_recv()
            active.append(waiting.popleft().run())
        steps = active.popleft()
        if next(steps, _ENDED) is not _ENDED:
            active.append(steps)
        after_step()


_ENDED = object()
