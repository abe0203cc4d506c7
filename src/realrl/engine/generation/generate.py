"""Generation: prompts in, sequences with their log-probabilities out."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from realrl.data.batch import Batch, Ragged
from realrl.engine.finite import NotFiniteLogitsError, all_finite
from realrl.engine.generation.sampling import sample, uniform
from realrl.engine.model import Model
from realrl.engine.pipeline.messages import Coming
from realrl.layout.limits import COMPACTION_SHARE
from realrl.model.cache import KVCache
from realrl.model.packing import Packing
from realrl.recipe.settings import GenerationConfig


@dataclass(frozen=True)
class Noise:
    """Seed of the sampling noise, besides the sequence and the position."""

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
    ends: tuple[int, ...],
    noise: Noise,
    budget: int,
    turn: Callable[[], None] = lambda: None,
) -> Batch:
    """Continue the rows of field `prompts`, with at most `budget` tokens in the key/value cache at a time.

    Adds sequences (prompt and continuation, end-of-sequence included), logprobs (aligned with them, 0 on the
    prompt), prompt_length, and finished (1.0 where the sequence ends with one of `ends`). Items are identified by
    their ids: the same ids, noise and parameters give the same tokens whatever else is in the batch. `turn` is
    called after each token. NotFiniteLogitsError if the model's logits are not finite.
    """
    costs = [length + sampling.max_new_tokens for length in batch[prompts].lengths]
    continuations = []
    # Every stage works on one chunk at a time, and a decoding step costs nearly the same however few rows it has.
    chunks = model.split(costs, budget, per_stage=1)
    for positions in chunks:
        part = batch.select(positions)
        ids = torch.tensor(part.ids, dtype=torch.int64, device=model.device)
        continuations.append(Continuation(model, part[prompts], ids, sampling, ends, noise))
    _run_in_turn(continuations, turn, at_once=model.parallel.pipeline.size)
    model.pipeline.finish()
    if not model.shard.last:
        return batch
    rows: list[tuple[Tensor, Tensor, bool] | None] = [None] * len(batch)
    for positions, continuation in zip(chunks, continuations, strict=True):
        for position, row in zip(positions, continuation.rows(), strict=True):
            rows[position] = row
    done = [row for row in rows if row is not None]
    return batch.with_fields(
        sequences=Ragged.of([tokens for tokens, _, _ in done], dtype=torch.int64),
        logprobs=Ragged.of([logprobs for _, logprobs, _ in done], dtype=torch.float32),
        prompt_length=Ragged.scalars(torch.tensor(batch[prompts].lengths, dtype=torch.int64)),
        finished=Ragged.scalars(torch.tensor([float(f) for _, _, f in done], dtype=torch.float32)),
    )


def _run_in_turn(continuations: "Sequence[Continuation]", turn: Callable[[], None], *, at_once: int) -> None:
    """Advance several continuations step by step, `at_once` at a time.

    While one is on another stage of the pipeline, this stage works on the next. Every stage goes through the same
    turns.
    """
    waiting, active = deque(continuations), deque[Iterator[None]]()
    while waiting or active:
        while waiting and len(active) < at_once:
            waiting[0].expect_prompts()
            active.append(waiting.popleft().run())
        run = active.popleft()
        if next(run, _ENDED) is not _ENDED:
            active.append(run)
        turn()


_ENDED = object()


class Continuation:
    """Decode batch: prompts that share one KV cache, as one stage of a pipeline sees them."""

    def __init__(
        self,
        model: Model,
        prompts: Ragged,
        ids: Tensor,
        sampling: GenerationConfig,
        ends: tuple[int, ...],
        noise: Noise,
    ) -> None:
        self.model, self.prompts, self.ids = model, prompts, ids
        self.sampling, self.noise = sampling, noise
        self.ends = torch.tensor(ends, dtype=torch.int64, device=model.device)
        count, limit, device = len(prompts), sampling.max_new_tokens, model.device
        self.tokens = torch.zeros(count, limit, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(count, limit, dtype=torch.float32, device=device)
        self.lengths = torch.full((count,), limit, device=device)
        self.finished = torch.zeros(count, dtype=torch.bool, device=device)
        self._prompts: Coming | None = None

    def expect_prompts(self) -> None:
        """Post the receives of prompts on the last stage, before any other continuation takes its turn.

        Messages come in the order of turns, and it expects those of one turn during the turn before. Stages between
        the first and the last know only in its turn how many rows a continuation still has.
        """
        if self.model.pipeline.last and not self.model.pipeline.first:
            self._prompts = self.model.pipeline.expect(len(self.prompts.values))

    @torch.no_grad()
    def run(self) -> Iterator[None]:
        """Yields once per token, after this stage has passed its part on and expects what the others will send."""
        model, pipeline, device = self.model, self.model.pipeline, self.model.device
        hidden, cache = self.prefill()
        slots = torch.arange(len(self.prompts), device=device)
        for position in range(self.sampling.max_new_tokens):
            if pipeline.last:
                chosen = self._draw(model.transformer.logits(hidden), slots, position)
                pipeline.tell(chosen)
            else:
                pipeline.send(hidden)
                told = pipeline.expect_tokens(len(slots))
                yield
                chosen = told.wait()
            self._record(chosen, slots, position)
            slots, chosen = self._going_on(slots, chosen, cache, position)
            x = pipeline.expect(len(slots)) if len(slots) and not pipeline.first else None
            if pipeline.last:
                yield
            if len(slots) == 0:
                return
            hidden = model.transformer.decode(chosen if x is None else x.wait(), cache)

    def _going_on(
        self, slots: Tensor, chosen: Tensor, cache: KVCache, position: int
    ) -> tuple[Tensor, Tensor]:
        """List the rows that get another token, and their last one."""
        if position + 1 == self.sampling.max_new_tokens:
            return slots[:0], chosen[:0]
        # Rows that have ended cost as much as others until they are taken out; taking them out copies the
        # cache, and on a GPU asking whether to makes the host wait.
        if slots.device.type != "cpu" and position % 16 != 15:
            return slots, chosen
        alive = ~self.finished[slots]
        remaining = int(alive.sum())
        if remaining > COMPACTION_SHARE * len(slots):
            return slots, chosen
        kept = alive.nonzero().squeeze(-1)
        if remaining:
            cache.keep(kept)
        return slots[kept], chosen[kept]

    def prefill(self) -> tuple[Tensor, KVCache]:
        """Compute the hidden states of the prompts, on the last stage only at their ends, and their cache."""
        model, prompts = self.model, self.prompts
        packing = Packing.of(prompts.lengths, model.device)
        cache = KVCache(
            layers=len(model.shard.layers),
            kv_heads=model.transformer.cache_heads,
            head_dim=model.shape.head_dim,
            rows=len(prompts),
            max_tokens=max(prompts.lengths) + self.sampling.max_new_tokens,
            dtype=model.dtype,
            device=model.device,
        )
        if model.pipeline.first:
            x = prompts.values.to(model.device)
        else:
            coming, self._prompts = self._prompts, None
            x = (coming or model.pipeline.expect(len(prompts.values))).wait()
        hidden = model.transformer.prefill(x, packing, cache)
        if model.pipeline.last:
            hidden = hidden[torch.tensor(prompts.offsets[1:], device=model.device) - 1]
        return hidden, cache

    def _draw(self, logits: Tensor, slots: Tensor, position: int) -> Tensor:
        """Sample the next token of the sequences in `slots`; record its log-probability. logits: [len(slots), V]"""
        allowed = logits
        if position < self.sampling.min_new_tokens:
            allowed = logits.index_fill(-1, self.ends, -torch.inf)
        positions = torch.full_like(slots, position)
        noise = uniform(self.noise.seed, self.noise.step, self.noise.first + self.ids[slots], positions)
        chosen, logprobs = sample(allowed, self.sampling, noise)
        if allowed is not logits:
            scaled = (logits / self.sampling.temperature).log_softmax(-1)
            logprobs = scaled.gather(-1, chosen.unsqueeze(-1)).squeeze(-1)
        self.logprobs[slots, position] = logprobs
        return chosen

    def _record(self, chosen: Tensor, slots: Tensor, position: int) -> None:
        self.tokens[slots, position] = chosen
        ended = (chosen.unsqueeze(-1) == self.ends).any(-1) & ~self.finished[slots]
        self.lengths[slots] = torch.where(ended, position + 1, self.lengths[slots])
        self.finished[slots] |= ended

    def rows(self) -> Iterator[tuple[Tensor, Tensor, bool]]:
        """List per prompt its sequence, aligned log-probabilities, and whether it ended by itself.

        NotFiniteLogitsError if a logit was not finite. Only here, since looking at each token makes a GPU wait.
        """
        tokens, logprobs = self.tokens.cpu(), self.logprobs.cpu()
        finished, lengths = self.finished.tolist(), self.lengths.tolist()
        for i, length in enumerate(lengths):
            if not all_finite(logprobs[i, :length]):
                position = int((~logprobs[i].isfinite()).nonzero()[0])
                raise NotFiniteLogitsError(position, self.noise.first + int(self.ids[i]))
        for i, prompt in enumerate(self.prompts.rows()):
            blank = torch.zeros(len(prompt))
            yield (
                torch.cat([prompt.cpu(), tokens[i, : lengths[i]]]),
                torch.cat([blank, logprobs[i, : lengths[i]]]),
                finished[i],
            )
