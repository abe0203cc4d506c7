"""Generation: prompts in, sequences with their log-probabilities out."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from realrl.config.algorithms import GenerationConfig
from realrl.data.batch import Batch, Ragged
from realrl.data.partition import micro_batches
from realrl.engine.model import Model
from realrl.engine.sampling import sample, uniform
from realrl.model.cache import KVCache
from realrl.model.packing import Packing


@dataclass(frozen=True)
class Noise:
    """What sampling noise depends on besides the sequence and the position."""

    seed: int
    step: int
    first: int = 0
    """Number of the sequence whose item is 0; the others follow."""


@torch.no_grad()
def generate(
    model: Model,
    batch: Batch,
    prompts: str,
    *,
    sampling: GenerationConfig,
    eos: int,
    noise: Noise,
    budget: int,
) -> Batch:
    """Continue the rows of field `prompts`, with at most `budget` tokens in the key/value cache at a time.

    Adds sequences (prompt and continuation, end-of-sequence included), logprobs (aligned with them, 0 on the
    prompt), prompt_length, and finished (1.0 where the sequence ends with `eos`). Items are told apart by
    their ids: the same ids, noise and parameters give the same tokens whatever else is in the batch.
    """
    rows: list[tuple[Tensor, Tensor, bool] | None] = [None] * len(batch)
    costs = [length + sampling.max_new_tokens for length in batch[prompts].lengths]
    for positions in micro_batches(costs, budget):
        part = batch.select(positions)
        ids = torch.tensor(part.ids, dtype=torch.int64, device=model.device)
        continuation = _Continuation(model, part[prompts], ids, sampling, eos, noise)
        for position, row in zip(positions, continuation.run(), strict=True):
            rows[position] = row
    done = [row for row in rows if row is not None]
    return batch.with_fields(
        sequences=Ragged.of([tokens for tokens, _, _ in done], dtype=torch.int64),
        logprobs=Ragged.of([logprobs for _, logprobs, _ in done], dtype=torch.float32),
        prompt_length=Ragged.scalars(torch.tensor(batch[prompts].lengths, dtype=torch.int64)),
        finished=Ragged.scalars(torch.tensor([float(f) for _, _, f in done], dtype=torch.float32)),
    )


class _Continuation:
    """Prompts that are continued together in one cache."""

    def __init__(
        self,
        model: Model,
        prompts: Ragged,
        ids: Tensor,
        sampling: GenerationConfig,
        eos: int,
        noise: Noise,
    ) -> None:
        self.model, self.prompts, self.ids = model, prompts, ids
        self.sampling, self.eos, self.noise = sampling, eos, noise
        count, limit, device = len(prompts), sampling.max_new_tokens, model.device
        self.tokens = torch.zeros(count, limit, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(count, limit, dtype=torch.float32, device=device)
        self.lengths = torch.full((count,), limit, device=device)
        self.finished = torch.zeros(count, dtype=torch.bool, device=device)

    def run(self) -> Iterator[tuple[Tensor, Tensor, bool]]:
        """Per prompt: its sequence, aligned log-probabilities, and whether it ended by itself."""
        model, device = self.model, self.model.device
        packing = Packing.of(self.prompts.lengths, device)
        longest = max(self.prompts.lengths) + self.sampling.max_new_tokens
        cache = KVCache(model.shape, len(self.prompts), longest, model.parameters.data.dtype, device)
        hidden = model.transformer.prefill(self.prompts.values.to(device), packing, cache)
        hidden = hidden[torch.tensor(self.prompts.offsets[1:], device=device) - 1]
        slots = torch.arange(len(self.prompts), device=device)
        for position in range(self.sampling.max_new_tokens):
            chosen = self._draw(model.transformer.logits(hidden), slots, position)
            if position + 1 == self.sampling.max_new_tokens:
                break
            alive = ~self.finished[slots]
            # Rows that have ended cost as much as others until they are taken out; taking them out copies
            # the cache, and on a GPU asking whether to makes the host wait.
            if device.type == "cpu" or position % 16 == 15:
                remaining = int(alive.sum())
                if remaining == 0:
                    break
                if remaining <= 0.8 * len(slots):
                    kept = alive.nonzero().squeeze(-1)
                    cache.keep(kept)
                    slots, chosen = slots[kept], chosen[kept]
            hidden = model.transformer.decode(chosen, cache)
        return self._rows()

    def _draw(self, logits: Tensor, slots: Tensor, position: int) -> Tensor:
        """Choose and record the next token of the sequences in `slots`. logits: [len(slots), V]"""
        if position < self.sampling.min_new_tokens:
            allowed = logits.clone()
            allowed[:, self.eos] = -torch.inf
        else:
            allowed = logits
        positions = torch.full_like(slots, position)
        noise = uniform(self.noise.seed, self.noise.step, self.noise.first + self.ids[slots], positions)
        chosen, logprobs = sample(allowed, self.sampling, noise)
        if allowed is not logits:
            scaled = (logits / self.sampling.temperature).log_softmax(-1)
            logprobs = scaled.gather(-1, chosen.unsqueeze(-1)).squeeze(-1)
        self.tokens[slots, position] = chosen
        self.logprobs[slots, position] = logprobs
        ended = (chosen == self.eos) & ~self.finished[slots]
        self.lengths[slots] = torch.where(ended, position + 1, self.lengths[slots])
        self.finished[slots] |= ended
        return chosen

    def _rows(self) -> Iterator[tuple[Tensor, Tensor, bool]]:
        tokens, logprobs = self.tokens.cpu(), self.logprobs.cpu()
        finished, lengths = self.finished.tolist(), self.lengths.tolist()
        for i, prompt in enumerate(self.prompts.rows()):
            blank = torch.zeros(len(prompt))
            yield (
                torch.cat([prompt.cpu(), tokens[i, : lengths[i]]]),
                torch.cat([blank, logprobs[i, : lengths[i]]]),
                finished[i],
            )
