"""Decode batch: rows that are decoded together on one stage of a pipeline; rows join and leave between turns."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from realrl.engine.generation.decode_memory import (
    DecodeKind,
    DecodeSize,
    KeptDecoding,
    count_computed_rows,
    is_gpu,
    list_addresses,
)
from realrl.engine.generation.lockstep import Lockstep, Pace
from realrl.engine.generation.prefill import PrefillPass, count_computed_tokens
from realrl.engine.generation.routed_experts import RoutedExperts
from realrl.engine.generation.sampling_noise import SamplingNoise, SamplingSeed
from realrl.engine.generation.scheduler import (
    DecodeRow,
    DecodeTurn,
    RowPrefill,
    Scheduler,
    make_idle_prefill,
)
from realrl.engine.generation.turns import Turns
from realrl.engine.model import Model
from realrl.engine.pipeline import PendingRecv
from realrl.layout.kv_blocks import (
    BLOCK_TOKENS,
    count_prefill_tokens,
    count_prompt_blocks,
    count_steps_per_look,
    size_cache,
)
from realrl.model.paged_attention import count_run_rows
from realrl.recipe.generation import GenerationConfig
from realrl.recipe.stop_strings import StopStrings

_WAIT_SECONDS, _SHORT_WAIT_SECONDS = 0.5, 0.01
"""How long a rank with nothing else to do waits for a reply before it tells the other ranks that there is none."""


class GenerateCall:
    """Rows, cache and sampling of a generate call on one rank, shared by its decode batches."""

    def __init__(
        self,
        model: Model,
        rows: Sequence[DecodeRow],
        *,
        sampling: GenerationConfig,
        stop_token_ids: tuple[int, ...],
        seed: SamplingSeed,
        kv_capacity: int,
        stop: StopStrings | None = None,
        pass_tokens: int | None = None,
        record_experts: bool = False,
        kept: KeptDecoding | None = None,
        turns: Turns | None = None,
        serves: bool = False,
    ) -> None:
        """Prepare the continuation of `rows`: allocate memory, or take the memory that earlier calls left in
        `kept`.

        `kv_capacity` is the number of tokens that the cache holds for each decode batch, on all ranks that divide
        the cache. `pass_tokens` limits the tokens of a prefill pass; its default depends on the device. With
        `record_experts`, a row's experts are read from the cache before the row leaves it. `turns` is the
        environment, if there is one. If it `serves` requests, rows choose tokens as their `choice` says, and those
        that have waited longest are evicted first.
        """
        mixture = model.shape.mixture if record_experts else None
        assert mixture is not None or not record_experts, "only mixtures have experts"
        self.model = model
        # Requests say themselves which tokens end them.
        self.stop_token_ids, self.stop = frozenset(() if serves else stop_token_ids), stop
        self.new_tokens = sampling.max_new_tokens
        self.turns = turns
        self._by_number = {row.number: row for row in rows}
        self.decoded = False
        """Whether this rank, or one that takes turns together with it, decoded rows in the last turn."""
        self.last_sent: int | None = None
        """Decode batch whose tokens the last stage has sent most recently."""
        self._rewound: list[tuple[DecodeRow, int]] = []
        """Rows that lose tokens in the turn that is being planned, and how many tokens they keep."""
        self.batches = batches = model.groups.pipeline.size
        """Number of decode batches: one per stage of the pipeline."""
        self.on_gpu = on_gpu = is_gpu(model.device)
        self.noise = SamplingNoise(seed)
        self.lockstep = Lockstep(model)
        lengths = [prompt.length for prompt in dict.fromkeys(row.prompt for row in rows)]
        block_tokens = BLOCK_TOKENS * model.groups.context.size
        size = size_cache(
            batches * kv_capacity,
            prompt_blocks=sum(count_prompt_blocks(length, block_tokens) for length in lengths),
            longest_prompt=max(lengths, default=1),
            rows=max(1, len(rows)),
            new_tokens=self.new_tokens,
            block_tokens=block_tokens,
        )
        if serves:
            size = replace(size, rows=len(rows))  # most requests are much shorter than the context
        recorded = 0 if mixture is None else mixture.per_token
        kind = DecodeKind(sampling, serves, stop_token_ids, recorded, batches, on_gpu, list_addresses(model))
        most = self.lockstep.agree_on_rows(count_computed_rows(-(-size.rows // batches), on_gpu=on_gpu))
        needed = DecodeSize(size.blocks, most, max(lengths, default=1))
        self.memory = (kept or KeptDecoding()).take(model, kind, needed)
        record = self.memory.cache.experts
        self.experts = None if record is None else RoutedExperts(record)
        """Experts of rows that have left the cache; None if experts are not recorded."""
        self.scheduler = Scheduler(
            rows,
            size,
            batches=batches,
            new_tokens=self.new_tokens,
            steps=count_steps_per_look(cpu=not on_gpu),
            prefill_tokens=pass_tokens or count_prefill_tokens(cpu=not on_gpu),
            waiting=turns is not None,
            oldest_first=serves,
        )

    def answer_rows(self) -> None:
        """Let rows go on whose environment has answered."""
        # At the end, earlier stages plan once more than the last stage, and there is nothing left to collect.
        if self.turns is None or self.scheduler.done:
            return
        seconds = _WAIT_SECONDS if self.scheduler.idle else 0.0
        if seconds and self.lockstep.joint:
            # The others wait for this rank, although one of them may have rows to decode, or get a reply first.
            seconds = 0.0 if self.decoded else _SHORT_WAIT_SECONDS
        if seconds:
            # Other stages wait for the tokens of the last turn, and the environment may take long.
            self.model.pipeline.flush()
        resumed = []
        for reply in self.turns.collect(seconds):
            row = self._by_number[reply.row]
            if reply.kept is not None:
                row.rewind(reply.kept)
                self._rewound.append((row, reply.kept))
            if reply.first is not None:
                assert row.prompt.length == 1 and not row.tokens, "only a prompt of one token is replaced"
                row.prompt.tokens[0] = reply.first
            if reply.done:
                self.scheduler.finish(row)
            else:
                row.give(reply.tokens)
                resumed.append(row)
        self.scheduler.resume(resumed)

    def read_experts(self, turn: DecodeTurn) -> None:
        """Read the experts of rows that have left the cache in this turn, and forget those of tokens that rows have
        lost."""
        if self.experts is not None:
            self.experts.read(turn.released)
            # Only now: a row may leave and start again in the same turn.
            for row, kept in self._rewound:
                self.experts.rewind(row, kept)
        self._rewound.clear()

    def take(self, row: DecodeRow, token: int, logprob: float) -> bool:
        """Append a sampled token to a row. Returns whether a token or a limit ends the row's turn here."""
        row.tokens.append(token)
        row.logprobs.append(logprob)
        ends = token in self.stop_token_ids or len(row.tokens) in (self.new_tokens, row.limit)
        if self.turns is not None:
            ends |= self.turns.note(row.number, len(row.tokens) - row.turn_start, token, logprob)
        return ends

    def end_turn(self, row: DecodeRow) -> None:
        """Complete a row or, with an environment, let the row wait for the environment."""
        if self.turns is None:
            row.done = True
            return
        row.away = True
        self.turns.end(row.number, row.tokens[row.turn_start :])

    def has_ended(self, row: DecodeRow) -> bool:
        """Return whether the model itself has ended the continuation, or its last turn."""
        return row.stopped or (len(row.tokens) > 0 and row.tokens[-1] in self.stop_token_ids)

    def find_stop(self, row: DecodeRow, looked: int) -> int | None:
        """Find the number of tokens after which a stop string ends a row; None if it goes on. The first `looked`
        tokens were checked before."""
        if self.stop is None:
            return None
        # A stop string does not begin in what the environment wrote.
        start = row.turn_start
        end = self.stop.find_end(row.tokens[start:] if start else row.tokens, looked - start)
        return None if end is None else start + end


class DecodeBatch:
    """Rows that are decoded together, in turns.

    A turn is a prefill of newly admitted rows and some decode steps; after it, the host looks at the sampled
    tokens. All stages of a pipeline take the same turns, because they plan them from the same tokens, which the
    last stage broadcasts.
    """

    def __init__(self, call: GenerateCall, number: int) -> None:
        """`number` is the index of the batch in the scheduler."""
        self._call = call
        self._number = number
        self._buffers = call.memory.buffers[number]
        self._step = call.memory.steps[number]
        self._rows = self._buffers.view(0)
        self._turn = DecodeTurn()
        self._pace = Pace(goes_on=True, prefills=False, steps=0, width=0)
        self._own_width = 0
        """Number of rows that this rank needs in a decode step."""
        self._prefill_recv: PendingRecv | None = None
        self._hidden_recv: PendingRecv | None = None

    @torch.no_grad()
    def run(self) -> Iterator[None]:
        """Yield after planning the first turn, and again after sending the result of each step.

        All stages must plan the turns of several batches in the same order. For this, the last stage plans its next
        turn before it yields, and the other stages plan theirs afterwards.
        """
        call = self._call
        pipeline = call.model.pipeline
        self._plan()
        yield
        # In a pipeline, another batch may have completed the last rows since this one planned its turn.
        while self._pace.goes_on if call.lockstep.joint else not call.scheduler.done:
            if pipeline.last:
                yield from self._run_turn_of_last_stage()
            else:
                yield from self._run_turn()

    def _run_turn(self) -> Iterator[None]:
        """Run a turn on a stage before the last one. It sends hidden states to the next stage, and receives the
        sampled tokens."""
        pipeline = self._call.model.pipeline
        self._begin()
        for step in range(self._pace.steps):
            if step and not pipeline.first:
                self._post_hidden_recv()
            pipeline.send(self._decode())
            tokens = pipeline.post_recv_tokens(self._pace.width)
            yield
            self._rows.advance(tokens.wait())
        if not self._pace.steps:
            # All rows wait: for blocks that other batches hold, or for their environment.
            yield
        self._record()
        self._plan()

    def _run_turn_of_last_stage(self) -> Iterator[None]:
        """Run a turn on the last stage, which samples and broadcasts tokens."""
        pipeline = self._call.model.pipeline
        self._begin()
        for step in range(self._pace.steps):
            self._decode()
            pipeline.broadcast_tokens(self._rows.sampled[step])
            self._call.last_sent = self._number
            if step + 1 < self._pace.steps:
                if not pipeline.first:
                    self._post_hidden_recv()
                yield
        self._record()
        self._plan()
        yield

    def _plan(self) -> None:
        """Plan the next turn, and request the messages that arrive first in it."""
        call = self._call
        turn = call.scheduler.plan(self._number, call.answer_rows)
        self._turn = turn
        call.read_experts(turn)
        self._buffers.arrange(turn)
        if turn.rearranged:
            self._own_width = count_computed_rows(len(turn.rows), on_gpu=call.on_gpu)
        before = self._pace.width
        self._pace = call.lockstep.agree(
            Pace(not call.scheduler.done, len(turn.prefills) > 0, turn.steps, self._own_width)
        )
        call.decoded = self._pace.steps > 0
        if turn.rearranged or self._pace.width != before:
            self._rows = self._buffers.view(self._pace.width)
        if turn.rows and not call.model.pipeline.first:
            if turn.prefills:
                tokens = count_computed_tokens(turn.prefills, call.model.groups.context.size)
                self._prefill_recv = call.model.pipeline.post_recv(tokens, followed=True)
            self._post_hidden_recv()

    def _post_hidden_recv(self) -> None:
        self._hidden_recv = self._call.model.pipeline.post_recv(self._pace.width)

    def _begin(self) -> None:
        """Prefill newly admitted rows, and begin the steps of the turn."""
        if self._pace.prefills:
            if self._call.last_sent == self._number:
                # Other batches have had no steps since, so that nothing has been received, and tokens may be held
                # back. The other stages need them for the plan of this turn.
                self._call.model.pipeline.flush()
            self._prefill(self._turn.prefills or [make_idle_prefill()])
        if self._pace.steps:
            self._rows.begin_turn(self._call.noise if self._call.model.pipeline.last else None)

    def _prefill(self, prefills: Sequence[RowPrefill]) -> None:
        """Compute the keys and values of sequences, and store them in the cache."""
        call = self._call
        model = call.model
        run_rows = count_run_rows(len(model.shard.queries), model.transformer.cache_kv_heads)
        part = PrefillPass.of(prefills, model.device, run_rows=run_rows, group=model.groups.context)
        pending, self._prefill_recv = self._prefill_recv, None
        x = part.tokens if pending is None else pending.wait()
        del pending
        with model.counts.prefill():
            hidden = model.transformer.prefill(x, part.prefill, call.memory.cache)
        if hidden is not None:
            model.pipeline.send(hidden, followed=True)

    def _decode(self) -> Tensor:
        """Run this stage's part of a decode step; returns hidden states, or tokens on the last stage."""
        pending, self._hidden_recv = self._hidden_recv, None
        hidden = None if pending is None else pending.wait()
        self._call.model.counts.add_decode_step(self._pace.width)
        return self._step.run(self._rows, hidden)

    def _record(self) -> None:
        """Read the tokens of a turn, and let rows leave whose sequence, or turn of the model, ends."""
        call = self._call
        rows = self._turn.rows
        if not rows:
            return
        tokens, logprobs = self._buffers.read(len(rows), self._pace.steps)
        for row, drawn, found in zip(rows, tokens, logprobs, strict=True):
            looked = len(row.tokens)
            pairs = zip(drawn, found, strict=True)
            ended = any(call.take(row, token, logprob) for token, logprob in pairs)
            end = call.find_stop(row, looked)
            if end is not None:
                del row.tokens[end:], row.logprobs[end:]
                row.stopped = True
            if ended or end is not None:
                call.end_turn(row)
