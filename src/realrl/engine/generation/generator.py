"""Generation: prompts in, sequences with their log-probabilities out."""

from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from realrl.data.batch import Batch, Ragged
from realrl.dataflow.call import ROUTED_EXPERTS
from realrl.engine.finite import NotFiniteLogitsError, all_finite
from realrl.engine.generation.decode_batch import DecodeBatch, GenerateCall
from realrl.engine.generation.decode_memory import KeptDecoding
from realrl.engine.generation.prefill import as_tensor
from realrl.engine.generation.routed_experts import join_stages
from realrl.engine.generation.sampling_noise import SamplingNoise, SamplingSeed
from realrl.engine.generation.scheduler import DecodeRow, Prompt
from realrl.engine.generation.turns import Turns
from realrl.engine.model import Model
from realrl.model.routing import EXPERT_DTYPE
from realrl.recipe.generation import GenerationConfig
from realrl.recipe.stop_strings import StopStrings


def group_samples(ids: Sequence[int], prompts: Ragged, samples: int) -> list[list[int]]:
    """Group the positions of items that are samples of one prompt.

    Such items have ids i * samples to (i + 1) * samples - 1 and equal rows. Their rows differ if the call continues
    sequences that an earlier call sampled.
    """
    if samples == 1:
        return [[position] for position in range(len(ids))]
    groups = defaultdict(list)
    for position, (item, row) in enumerate(zip(ids, prompts.rows(), strict=True)):
        groups[item // samples, tuple(row.tolist())].append(position)
    return list(groups.values())


@dataclass(frozen=True, eq=False)
class Part:
    """A part of the continuations of items, which a generate call samples in several parts.

    Between two parts, the parameters may change. The cache is not kept, so each part begins with a prefill of what
    the earlier parts have sampled.
    """

    keys: Sequence[int]
    """Key of each item's sampling noise (`SamplingNoise.make_keys`)."""
    begun: Sequence[tuple[Sequence[int], Sequence[float]]]
    """For each item: the tokens that earlier parts have sampled, and their log-probabilities."""
    tokens: int
    """Maximum number of tokens that an item gets in this part."""


def generate(
    model: Model,
    batch: Batch,
    prompts: str,
    *,
    after_step: Callable[[], None] = lambda: None,
    **settings: Any,
) -> Batch:
    """Run a whole generate call. The arguments are those of `Generation`; `after_step` is called after each decode
    step."""
    generation = Generation(model, batch, prompts, **settings)
    generation.run(after_step)
    return generation.take()


class Generation:
    """A generate call: it continues the rows of a field, each by at most `sampling.max_new_tokens` tokens.

    It can pause while some items go on. Its cache stays in memory meanwhile.
    """

    @torch.no_grad()
    def __init__(
        self,
        model: Model,
        batch: Batch,
        prompts: str,
        *,
        sampling: GenerationConfig,
        stop_token_ids: tuple[int, ...],
        seed: SamplingSeed,
        kv_capacity: int,
        stop: StopStrings | None = None,
        samples: int = 1,
        record_experts: bool = False,
        kept: KeptDecoding | None = None,
        turns: Turns | None = None,
        part: Part | None = None,
        together: int | None = None,
    ) -> None:
        """Begin the call, which continues the rows of field `prompts`.

        The KV cache holds at most `kv_capacity` tokens at a time, for each stage of a pipeline, and at least one
        row. Items i * `samples` to (i + 1) * `samples` - 1 are samples of one prompt. If they run at the same time,
        they share its prefill and its part of the cache.

        An item's tokens depend only on its id, the seed and the parameters, not on other items of the batch. This
        always holds with exact products; otherwise, rounding may change a token (docs/exact.md).

        With `turns`, a continuation has turns of the model and of an environment, and at most
        `sampling.max_new_tokens` tokens of both. It begins with tokens of the environment.

        With `part`, items continue what earlier parts have sampled, and pause after a number of tokens.

        Items i * `together` to (i + 1) * `together` - 1 are a group, whose items are taken together; None for the
        samples of each prompt. `kept` holds memory that later calls of this model use again; without it, all memory
        is freed at the end.
        """
        self._model, self._batch, self._given = model, batch, batch[prompts]
        self._turns, self._part, self._first = turns, part, seed.first_sequence
        groups = group_samples(batch.ids, self._given, samples)
        # Prompts that are prefilled together should have similar lengths, because some attention kernels pad them.
        groups.sort(key=lambda group: -self._given.lengths[group[0]])
        rows = list_rows(groups, self._given.to(torch.device("cpu")))
        ids = torch.tensor(batch.ids, dtype=torch.int64)
        keys = SamplingNoise(seed).make_keys(ids).tolist() if part is None else part.keys
        for row in rows:
            row.key = keys[row.number]
            if part is not None:
                tokens, known = part.begun[row.number]
                row.tokens.extend(tokens)
                row.logprobs.extend(known)
                row.limit = len(tokens) + part.tokens
        self._call = GenerateCall(
            model,
            rows,
            sampling=sampling,
            stop_token_ids=stop_token_ids,
            seed=seed,
            kv_capacity=kv_capacity,
            stop=stop,
            # Other TP ranks choose the same experts, so one record is enough.
            record_experts=record_experts and model.groups.tensor.index == 0,
            kept=kept,
            turns=turns,
        )
        self._left = sorted(rows, key=lambda row: row.number)
        """Rows that have not been taken, in the order of their items."""
        self._open: dict[int, list[DecodeRow]] = {}
        """Groups with rows that have not ended, and these rows."""
        self._group_of = [item // (together or samples) for item in batch.ids]
        for row in self._left:
            self._open.setdefault(self._group_of[row.number], []).append(row)
        self.groups = len(self._open)
        # While one stage of a pipeline works on a decode batch, the other stages work on the other batches.
        batches = [DecodeBatch(self._call, number) for number in range(self._call.batches)]
        self._active = deque[Iterator[None]](batch.run() for batch in batches)
        self._begun = False

    @torch.no_grad()
    def run(self, after_step: Callable[[], None] = lambda: None, *, most_open: int = 0) -> None:
        """Sample until at most `most_open` groups have items that go on.

        Decode batches advance step by step. While one batch is on another stage of the pipeline, this stage works
        on the next. Every stage takes the same steps in the same order, and so pauses after the same tokens.
        """
        if not self._begun:
            for steps in self._active:
                next(steps)
            self._begun = True
        while self._active and (most_open == 0 or self._count_open() > most_open):
            steps = self._active.popleft()
            if next(steps, _ENDED) is not _ENDED:
                self._active.append(steps)
                after_step()
        if not self._active:
            self._model.pipeline.wait_sends()

    def _count_open(self) -> int:
        left = {group: [row for row in rows if not row.done] for group, rows in self._open.items()}
        self._open = {group: rows for group, rows in left.items() if rows}
        return len(self._open)

    @torch.no_grad()
    def take(self, *, left: int = 0) -> Batch:
        """Take the items of groups that have ended, but leave `left` groups for later.

        Adds these fields: sequences (prompt and continuation, with end-of-sequence), logprobs (aligned with
        sequences, 0 on the prompt), prompt_length, and finished. `finished` is 1.0 if the sequence ends with one of
        `stop_token_ids`, or with the token that completes one of the `stop` strings.

        With `record_experts`, the first TP rank of a mixture also adds routed_experts: for each token the k experts
        of every layer of the model, [T, layers * k]. An entry is -1 if the token has not passed through the layer.
        The last token passes through no layer. Of the prompt, only the last token passes through the last layer.

        With `turns`, the field action_mask is 1 for the tokens that the model sampled, and 0 for all others;
        `finished` is about the model's last turn.

        Stages before the last one of a pipeline add no fields, except with `part`, because all stages need the
        tokens for the next part. Only the last stage has the log-probabilities.

        Raises NotFiniteLogitsError if the model's logits are not finite.
        """
        self._count_open()
        groups = dict.fromkeys(self._group_of[row.number] for row in self._left)
        ended = [group for group in groups if group not in self._open]
        chosen = {*ended[: len(groups) - left]}
        rows = [row for row in self._left if self._group_of[row.number] in chosen]
        self._left = [row for row in self._left if self._group_of[row.number] not in chosen]
        model, call = self._model, self._call
        experts = [] if call.experts is None else join_stages(model, rows, call.experts)
        batch = self._batch
        if len(rows) < len(batch):
            batch = batch.select([row.number for row in rows])
        if not model.shard.last and self._part is None:
            return batch
        for row, item in zip(rows, batch.ids, strict=True) if model.shard.last else ():
            _check_finite(row, self._first + item)
        # An environment may have replaced a prompt.
        sequences = [as_tensor(row.prompt.tokens + row.tokens, torch.int64) for row in rows]
        logprobs = [
            torch.cat([torch.zeros(row.prompt.length), as_tensor(row.logprobs, torch.float32)])
            for row in rows
        ]
        finished = torch.tensor([float(call.has_ended(row)) for row in rows])
        if experts:
            batch = batch.with_fields(**{ROUTED_EXPERTS: Ragged.of(experts, dtype=EXPERT_DTYPE)})
        if self._turns is not None:
            masks = [_mask_actions(row) for row in rows]
            batch = batch.with_fields(action_mask=Ragged.of(masks, dtype=torch.int16))
        lengths = [self._given.lengths[row.number] for row in rows]
        return batch.with_fields(
            sequences=Ragged.of(sequences, dtype=torch.int64),
            logprobs=Ragged.of(logprobs, dtype=torch.float32),
            prompt_length=Ragged.scalars(torch.tensor(lengths, dtype=torch.int64)),
            finished=Ragged.scalars(finished),
        )


def _mask_actions(row: DecodeRow) -> torch.Tensor:
    """Mark the tokens that the model sampled. [prompt and continuation] int16"""
    mask = torch.zeros(row.prompt.length + len(row.tokens), dtype=torch.int16)
    mask[row.prompt.length :] = 1
    for start, end in row.given:
        mask[row.prompt.length + start : row.prompt.length + end] = 0
    return mask


def list_rows(groups: Sequence[Sequence[int]], prompts: Ragged) -> list[DecodeRow]:
    """Make the rows of a call; the rows of a prompt are neighbours. `prompts` are on the host."""
    rows = []
    for number, group in enumerate(groups):
        prompt = Prompt(number, array("q", prompts.row(group[0]).tolist()))
        rows += [DecodeRow(position, prompt) for position in group]
    return rows


_ENDED = object()


def _check_finite(row: DecodeRow, item: int) -> None:
    """Raise NotFiniteLogitsError if a log-probability is not finite.

    This happens only at the end of a call, because checking each token would make the host wait for the GPU.
    """
    logprobs = as_tensor(row.logprobs, torch.float32)
    if not all_finite(logprobs):
        raise NotFiniteLogitsError(int((~logprobs.isfinite()).nonzero()[0]), item)
