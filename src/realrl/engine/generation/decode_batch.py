"""Decode batch: prefill and decode steps of prompts that share one KV cache."""

from collections.abc import Iterator

import torch
from torch import Tensor

from realrl.engine.finite import NotFiniteLogitsError, all_finite
from realrl.engine.generation.prompts import DistinctPrompts
from realrl.engine.generation.sampling import SamplingSeed, compute_uniform, sample
from realrl.engine.model import Model
from realrl.engine.pipeline.messages import PendingRecv
from realrl.layout.limits import COMPACTION_SHARE
from realrl.model.cache import KVCache
from realrl.model.packing import Packing
from realrl.model.shared_prefix_cache import SharedPrefixCache
from realrl.recipe.settings import GenerationConfig

Cache = KVCache | SharedPrefixCache
"""Keys and values of a decode batch: of each row, or of each prompt and of each row's own tokens."""
_NOISE_POSITIONS = 32
"""Positions whose sampling noise is computed at once: dozens of small operations, whatever their number."""


class DecodeBatch:
    """Rows that share one KV cache, as one stage of a pipeline sees them.

    A row is a prompt with its continuation; `prompt_of_row` says which of `prompts`. `active_rows` are the indices
    of those that still run: row i of the cache is row active_rows[i] of the batch.
    """

    def __init__(
        self,
        model: Model,
        prompts: DistinctPrompts,
        ids: Tensor,
        *,
        sampling: GenerationConfig,
        stop_token_ids: tuple[int, ...],
        seed: SamplingSeed,
    ) -> None:
        """`ids`: [B] int64, numbers of the items, by which their sampling noise differs."""
        self.model = model
        self.prompts = prompts.rows
        self.prompt_of_row = prompts.of_row
        self.ids = ids
        self.sampling = sampling
        self.seed = seed
        device = model.device
        count = len(ids)
        limit = sampling.max_new_tokens
        self.stop_token_ids = torch.tensor(stop_token_ids, dtype=torch.int64, device=device)
        self.tokens = torch.zeros(count, limit, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(count, limit, dtype=torch.float32, device=device)
        self.lengths = torch.full((count,), limit, device=device)
        self.finished = torch.zeros(count, dtype=torch.bool, device=device)
        self._prompt_recv: PendingRecv | None = None
        self._noise_ahead = torch.empty(0, dtype=torch.float64, device=device)

    def post_prompt_recv(self) -> None:
        """Post the receive of prompts on the last stage, before any other decode batch takes its next step.

        Messages come in the order of steps, and a stage posts the receives of one step during the step before.
        Stages between the first and the last know only in their step how many rows of a batch are active.
        """
        if self.model.pipeline.last and not self.model.pipeline.first:
            self._prompt_recv = self.model.pipeline.post_recv(len(self.prompts.values))

    @torch.no_grad()
    def run(self) -> Iterator[None]:
        """Yield once per token, when this stage has sent its part and posted its next receive.

        The last stage samples and broadcasts the tokens; the others send hidden states on and receive the tokens.
        """
        model = self.model
        pipeline = model.pipeline
        hidden, cache = self.prefill()
        active_rows = torch.arange(len(self.ids), device=model.device)
        for position in range(self.sampling.max_new_tokens):
            if pipeline.last:
                tokens = self._sample(model.transformer.compute_logits(hidden), active_rows, position)
                pipeline.broadcast_tokens(tokens)
            else:
                pipeline.send(hidden)
                token_recv = pipeline.post_recv_tokens(len(active_rows))
                yield
                tokens = token_recv.wait()
            self._record(tokens, active_rows, position)
            active_rows, tokens = self._compact(active_rows, tokens, cache, position)
            receives = len(active_rows) > 0 and not pipeline.first
            hidden_recv = pipeline.post_recv(len(active_rows)) if receives else None
            if pipeline.last:
                yield
            if len(active_rows) == 0:
                return
            hidden = model.transformer.decode(tokens if hidden_recv is None else hidden_recv.wait(), cache)

    def _compact(
        self, active_rows: Tensor, tokens: Tensor, cache: Cache, position: int
    ) -> tuple[Tensor, Tensor]:
        """Remove finished rows from the cache where it pays; return the rows that run on and their last tokens."""
        if position + 1 == self.sampling.max_new_tokens:
            return active_rows[:0], tokens[:0]
        # Finished rows cost as much as others until they are removed; removing them copies the cache, and on a GPU
        # deciding whether to makes the host wait.
        if active_rows.device.type != "cpu" and position % 16 != 15:
            return active_rows, tokens
        unfinished = ~self.finished[active_rows]
        remaining = int(unfinished.sum())
        if remaining > COMPACTION_SHARE * len(active_rows):
            return active_rows, tokens
        kept = unfinished.nonzero().squeeze(-1)
        if remaining:
            cache.keep(kept)
        return active_rows[kept], tokens[kept]

    def prefill(self) -> tuple[Tensor, Cache]:
        """Compute the hidden states of the prompts and their KV cache.

        Hidden states are [T, H], on the last stage those of the last token before each row's continuation, [B, H].
        """
        model = self.model
        prompts = self.prompts
        packing = Packing.of(prompts.lengths, model.device)
        cache = self._make_cache()
        if model.pipeline.first:
            x = prompts.values.to(model.device)
        else:
            pending, self._prompt_recv = self._prompt_recv, None
            if pending is None:
                pending = model.pipeline.post_recv(len(prompts.values))
            x = pending.wait()
        hidden = model.transformer.prefill(x, packing, cache)
        if model.pipeline.last:
            ends = [prompts.offsets[prompt + 1] - 1 for prompt in self.prompt_of_row]
            hidden = hidden[torch.tensor(ends, device=model.device)]
        return hidden, cache

    def _make_cache(self) -> Cache:
        model = self.model
        longest = max(self.prompts.lengths)
        limit = self.sampling.max_new_tokens
        if len(self.prompts) < len(self.ids):
            return SharedPrefixCache(
                layers=len(model.shard.layers),
                kv_heads=model.transformer.cache_kv_heads,
                head_dim=model.shape.head_dim,
                prompt_of_row=self.prompt_of_row,
                max_prompt=longest,
                max_new_tokens=limit,
                dtype=model.dtype,
                device=model.device,
            )
        return KVCache(
            layers=len(model.shard.layers),
            kv_heads=model.transformer.cache_kv_heads,
            head_dim=model.shape.head_dim,
            rows=len(self.ids),
            max_tokens=longest + limit,
            dtype=model.dtype,
            device=model.device,
        )

    def _sample(self, logits: Tensor, rows: Tensor, position: int) -> Tensor:
        """Sample the next token of `rows` and record its log-probability. logits: [len(rows), V]"""
        allowed = logits
        if position < self.sampling.min_new_tokens:
            allowed = logits.index_fill(-1, self.stop_token_ids, -torch.inf)
        tokens, logprobs = sample(allowed, self.sampling, self._noise(position)[rows])
        temperature = self.model.temperature
        if allowed is not logits or self.sampling.temperature != temperature:
            # Training knows of no forbidden tokens, nor of another temperature in evaluation: log-probabilities are
            # those of the whole vocabulary at the temperature of the model.
            scaled = (logits / temperature).log_softmax(-1)
            logprobs = scaled.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        self.logprobs[rows, position] = logprobs
        return tokens

    def _noise(self, position: int) -> Tensor:
        """Compute the sampling noise of all rows at a position, [B]; positions come in order, and the noise of the
        next ones is computed at once."""
        place = position % _NOISE_POSITIONS
        if place == 0:
            seed = self.seed
            sequences = (seed.first_sequence + self.ids).expand(_NOISE_POSITIONS, -1)
            positions = torch.arange(position, position + _NOISE_POSITIONS, device=self.ids.device)
            positions = positions.unsqueeze(-1).expand_as(sequences)
            self._noise_ahead = compute_uniform(seed.seed, seed.step, sequences, positions, call=seed.call)
        return self._noise_ahead[place]

    def _record(self, tokens: Tensor, rows: Tensor, position: int) -> None:
        """Record the sampled tokens of `rows`, and which of them end their sequences."""
        self.tokens[rows, position] = tokens
        ended = (tokens.unsqueeze(-1) == self.stop_token_ids).any(-1) & ~self.finished[rows]
        self.lengths[rows] = torch.where(ended, position + 1, self.lengths[rows])
        self.finished[rows] |= ended

    def results(self) -> Iterator[tuple[Tensor, Tensor, bool]]:
        """List per row its sequence, aligned log-probabilities, and whether it ended by itself.

        NotFiniteLogitsError if a logit was not finite. Only here, since looking at each token makes a GPU wait.
        """
        tokens = self.tokens.cpu()
        logprobs = self.logprobs.cpu()
        finished = self.finished.tolist()
        lengths = self.lengths.tolist()
        for i, length in enumerate(lengths):
            if not all_finite(logprobs[i, :length]):
                position = int((~logprobs[i].isfinite()).nonzero()[0])
                raise NotFiniteLogitsError(position, self.seed.first_sequence + int(self.ids[i]))
        for i, number in enumerate(self.prompt_of_row):
            prompt = self.prompts.row(number)
            prompt_logprobs = torch.zeros(len(prompt))
            yield (
                torch.cat([prompt.cpu(), tokens[i, : lengths[i]]]),
                torch.cat([prompt_logprobs, logprobs[i, : lengths[i]]]),
                finished[i],
            )
