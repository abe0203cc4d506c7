"""Scheduler of continuous batching: which rows are decoded, and where their keys and values lie.

Rows wait in one queue, with the rows of a prompt next to each other. They run in as many decode batches as the
pipeline has stages. `plan` is called once per turn of a decode batch. It retires finished rows, gives running rows
blocks for the coming steps, and admits waiting rows while blocks are free. If the pool runs dry, the batch's
youngest row is preempted: it frees its blocks, returns to the head of the queue, and is later prefilled again with
its generated tokens.

With an environment, a row whose turn has ended leaves its batch, too. It waits outside the queue until the
environment has answered, and then returns to the head of the queue. It keeps its blocks meanwhile, so that only new
tokens are prefilled later. But running rows come first: if they need blocks, waiting rows are evicted. An evicted
row is prefilled as a whole.

Plans depend only on the order in which `plan` is called and on the lengths of rows. So all ranks of a pipeline, of
a tensor-parallel group and of a context-parallel group make the same plans from the same tokens.
"""

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from realrl.layout.kv_blocks import REPLACED_TOGETHER, CacheSize, count_blocks, count_prompt_blocks

SCRATCH = 0
"""Block that no row owns. Rows that only pad a step, and finished rows, write to it. Its content is never used."""


class BlockPool:
    """Free blocks of the KV cache, numbered from 1; the most recently released blocks are taken first."""

    def __init__(self, blocks: int) -> None:
        self._free = list(range(blocks, SCRATCH, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Take `count` blocks; there must be enough."""
        assert count <= len(self._free), "the cache has no free blocks"
        return [self._free.pop() for _ in range(count)]

    def release(self, blocks: Sequence[int]) -> None:
        self._free.extend(reversed(blocks))


@dataclass(eq=False)
class Prompt:
    """Prompt of one or more rows, and the blocks that they share while any of them is in the cache."""

    number: int
    tokens: "array[int]"
    blocks: list[int] = field(default_factory=list)
    holders: int = 0
    """Number of its rows in the cache."""

    @property
    def length(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class TokenChoice:
    """How a row's next token is chosen, in a call whose rows differ in this."""

    temperature: float = 1.0
    """0 for the likeliest token."""
    top_k: int = 0
    """0 for all tokens."""
    top_p: float = 1.0
    first_end: int = 0
    """Length of the continuation from which on an end is allowed."""


@dataclass(eq=False)
class DecodeRow:
    """Prompt with its continuation; `number` identifies the row in its generate call."""

    number: int
    prompt: Prompt
    key: int = 0
    """Key of the row's sampling noise."""
    choice: TokenChoice = TokenChoice()
    tokens: "array[int]" = field(default_factory=lambda: array("q"))
    """Continuation so far."""
    logprobs: "array[float]" = field(default_factory=lambda: array("f"))
    blocks: list[int] = field(default_factory=list)
    """Blocks of its own segment; empty if the row is not in the cache."""
    cached: int = 0
    """Number of tokens of its own segment in the cache while the row waits there. The segment begins with the last
    token of the prompt."""
    limit: int | None = None
    """Length of the continuation at which the row pauses, until a later call; None for no pause."""
    done: bool = False
    """Whether the continuation is complete, or pauses."""
    stopped: bool = False
    """Whether a stop string ended the continuation, or its last turn."""
    away: bool = False
    """Whether the row waits for its environment."""
    given: list[tuple[int, int]] = field(default_factory=list)
    """Parts of the continuation that an environment wrote: first token, and the token after the last."""
    slot: int = -1
    """Index of the row in the buffers of the decode batch; -1 if it has no index yet."""

    @property
    def turn_start(self) -> int:
        """Number of tokens before the current turn of the model."""
        return self.given[-1][1] if self.given else 0

    def give(self, tokens: Sequence[int]) -> None:
        """Append tokens that the model has not sampled."""
        start = len(self.tokens)
        self.tokens.extend(tokens)
        self.logprobs.extend([0.0] * len(tokens))
        self.given.append((start, len(self.tokens)))
        self.stopped = False

    def rewind(self, length: int) -> None:
        """Drop the continuation after its first `length` tokens."""
        assert length <= len(self.tokens), "the row never had these tokens"
        del self.tokens[length:], self.logprobs[length:]
        self.given = [(start, min(end, length)) for start, end in self.given if start < length]
        self.cached = min(self.cached, length)
        self.stopped = False


@dataclass(frozen=True)
class RowPrefill:
    """Tokens that are computed before `row` is decoded: its prompt and generated tokens, except the newest token.

    These are positions `first` to `length` - 1. Keys and values of earlier positions are in the cache, or the same
    pass stores them for another row of the prompt.
    """

    row: DecodeRow
    first: int
    length: int

    @property
    def tokens(self) -> int:
        """Number of tokens to compute."""
        return self.length - self.first


@dataclass(frozen=True)
class ReleasedRow:
    """Row that has left the cache: finished, preempted or evicted. Its blocks keep their content until other rows
    write to them."""

    row: DecodeRow
    prompt_blocks: Sequence[int]
    """Blocks of its prompt, which other rows may still hold."""
    blocks: Sequence[int]
    cached: int
    """Number of tokens of its own segment in `blocks`."""


@dataclass(frozen=True)
class DecodeTurn:
    """Work of a decode batch until the host looks at its tokens again."""

    rows: Sequence[DecodeRow] = ()
    """Rows to decode, sorted by prompt."""
    rearranged: bool = False
    """Whether the rows differ from those of the previous turn."""
    grown: Sequence[DecodeRow] = ()
    """Rows with new blocks."""
    prefills: Sequence[RowPrefill] = ()
    """Sequences that are prefilled first, in one forward pass."""
    steps: int = 0
    """Number of decode steps."""
    released: Sequence[ReleasedRow] = ()
    """Rows that have left the cache since the last turn."""


class Scheduler:
    """Rows of a generate call: the waiting rows, and the running rows of each decode batch."""

    def __init__(
        self,
        rows: Iterable[DecodeRow],
        size: CacheSize,
        *,
        batches: int,
        new_tokens: int,
        steps: int,
        prefill_tokens: int,
        waiting: bool = False,
        oldest_first: bool = False,
    ) -> None:
        """`batches` is the number of decode batches, `new_tokens` the maximum length of a continuation. `steps` is
        the number of decode steps of a turn; turns have one step while more prompts are to be prefilled.
        `prefill_tokens` limits the tokens of a prefill pass; a longer sequence gets a pass of its own. With
        `waiting`, all rows begin with waiting for their environment. With `oldest_first`, the rows that have waited
        longest are evicted first, otherwise those whose turns ended last."""
        rows = list(rows)
        self._queue = deque([] if waiting else rows)
        self._away: dict[DecodeRow, None] = dict.fromkeys(rows if waiting else [])
        """Rows that wait for their environment, in the order in which their turns ended."""
        for row in self._away:
            row.away = True
        self._pool = BlockPool(size.blocks)
        self._block_tokens = size.block_tokens
        self._running: list[list[DecodeRow]] = [[] for _ in range(batches)]
        """Running rows of each decode batch, in the order of admission."""
        self._turns = [DecodeTurn()] * batches
        self._released: list[ReleasedRow] = []
        """Rows that leave in the turn that is being planned."""
        self._oldest_first = oldest_first
        self._limit = -(-size.rows // batches)
        self._new_tokens = new_tokens
        self._steps = steps
        self._prefill_tokens = prefill_tokens

    @property
    def done(self) -> bool:
        """Whether every row is complete."""
        return self.idle and not self._away

    @property
    def idle(self) -> bool:
        """Whether no row is queued or runs."""
        return not self._queue and not any(self._running)

    def resume(self, rows: Sequence[DecodeRow]) -> None:
        """Queue rows whose environment has answered, before all others, so that their sequences end soon."""
        for row in reversed(rows):
            del self._away[row]
            row.away = False
            self._queue.appendleft(row)

    def finish(self, row: DecodeRow) -> None:
        """Complete a row that waits for its environment."""
        del self._away[row]
        row.away, row.done = False, True
        if row.blocks:
            self._release(row)

    def plan(self, batch: int, answer: Callable[[], None] = lambda: None) -> DecodeTurn:
        """Plan the next turn of a decode batch.

        `answer` is called after rows have left the batch. It calls `resume` and `finish` for the rows whose
        environment has answered.
        """
        running = self._running[batch]
        before = len(running)
        self._released = []
        retired = [row for row in running if row.done or row.away]
        if retired:
            running[:] = [row for row in running if not (row.done or row.away)]
            for row in retired:
                row.slot, row.cached = -1, len(row.tokens)
                if row.away:
                    self._away[row] = None
                else:
                    self._release(row)
        answer()
        kept = len(running)
        grown = self._grow(running)
        preempted = kept - len(running)
        # A row that is admitted in the same turn as a preemption would be the next row to be preempted.
        prefills, more = ([], False) if preempted else self._admit(running)
        rearranged = before != kept or preempted > 0 or len(running) > kept
        rows = self._turns[batch].rows
        if rearranged:
            rows = sorted(running, key=lambda row: (row.prompt.number, row.number))
        self._turns[batch] = DecodeTurn(
            rows=rows,
            rearranged=rearranged,
            grown=[row for row in grown if row.blocks],
            prefills=prefills,
            steps=1 if more else self._steps if rows else 0,
            released=self._released,
        )
        return self._turns[batch]

    def _grow(self, running: list[DecodeRow]) -> list[DecodeRow]:
        """Give rows blocks for the coming steps, the oldest first; if blocks run out, preempt the youngest rows."""
        grown = []
        for row in list(running):
            missing = self._count_own_blocks(row) - len(row.blocks)
            # A preempted row has no blocks.
            while row.blocks and missing > self._pool.free and not self._make_room(missing):
                self._preempt(running)
            if row.blocks and missing > 0:
                row.blocks += self._pool.take(missing)
                grown.append(row)
        return grown

    def _preempt(self, running: list[DecodeRow]) -> None:
        row = running.pop()
        row.slot, row.cached = -1, len(row.tokens)
        self._release(row)
        self._queue.appendleft(row)

    def _make_room(self, needed: int, keep: DecodeRow | None = None) -> bool:
        """Evict waiting rows, except `keep`, until `needed` blocks are free. If all of them would not be enough,
        evict none, and return False."""
        away = self._away if self._oldest_first else reversed(self._away)
        waiting = [*away, *reversed(self._queue)]  # the head of the queue runs next
        free, victims = self._pool.free, []
        left: dict[Prompt, int] = {}
        for row in waiting:
            if free >= needed:
                break
            if row.blocks and row is not keep:
                victims.append(row)
                left[row.prompt] = left.get(row.prompt, row.prompt.holders) - 1
                free += len(row.blocks) + (0 if left[row.prompt] else len(row.prompt.blocks))
        if free < needed:
            return False
        for row in victims:
            self._release(row)
        return True

    def _release(self, row: DecodeRow) -> None:
        """Release the blocks of a row. If no other row of its prompt is in the cache, also release the blocks of
        the prompt."""
        self._released.append(ReleasedRow(row, row.prompt.blocks, row.blocks, row.cached))
        self._pool.release(row.blocks)
        row.blocks, row.cached = [], 0
        row.prompt.holders -= 1
        if not row.prompt.holders:
            self._pool.release(row.prompt.blocks)
            row.prompt.blocks = []

    def _admit(self, running: list[DecodeRow]) -> tuple[list[RowPrefill], bool]:
        """Admit waiting rows while there are slots and blocks, until one prefill pass is full.

        Returns the prefills, and whether more rows could be admitted with another prefill pass.
        """
        queue = self._queue
        slots = self._limit - len(running)
        # Rows are replaced several at a time, because a prefill of fewer rows costs nearly as much.
        if not queue or (running and slots < min(len(queue), -(-self._limit // REPLACED_TOGETHER))):
            return [], False
        prefills: list[RowPrefill] = []
        tokens = 0
        most = count_blocks(self._new_tokens, self._block_tokens)
        growing = sum(len(row.blocks) < most for rows in self._running for row in rows)
        while queue and len(running) < self._limit:
            row = queue[0]
            # Leave a block for each row that will need one, so that the next turns need not preempt a row.
            if not self._fit(row, growing):
                break
            prefill = _make_prefill(row)
            if tokens and tokens + prefill.tokens > self._prefill_tokens:
                return prefills, True
            if prefill.tokens:
                prefills.append(prefill)
                tokens += prefill.tokens
            queue.popleft()
            self._place(row)
            running.append(row)
            growing += len(row.blocks) < most
        return prefills, False

    def _fit(self, row: DecodeRow, spare: int) -> bool:
        """Make room for a row that is to run, and for `spare` blocks more. Returns whether there is room."""
        while True:
            needed = self._count_missing_blocks(row) + spare
            if needed <= self._pool.free:
                return True
            # This may evict the last row that holds the prompt.
            if not self._make_room(needed, keep=row):
                return False

    def _place(self, row: DecodeRow) -> None:
        """Give a row that is to run the blocks that it lacks."""
        if not row.prompt.holders:
            row.prompt.blocks = self._pool.take(count_prompt_blocks(row.prompt.length, self._block_tokens))
        row.prompt.holders += not row.blocks
        row.blocks += self._pool.take(max(0, self._count_own_blocks(row) - len(row.blocks)))

    def _count_missing_blocks(self, row: DecodeRow) -> int:
        """Count the blocks that a row lacks in order to run, with those of its prompt."""
        shared = 0 if row.prompt.holders else count_prompt_blocks(row.prompt.length, self._block_tokens)
        return shared + max(0, self._count_own_blocks(row) - len(row.blocks))

    def _count_own_blocks(self, row: DecodeRow) -> int:
        return count_blocks(min(len(row.tokens) + self._steps, self._new_tokens), self._block_tokens)


def make_idle_prefill() -> RowPrefill:
    """Make a prefill of one token that counts nowhere: its key and value go to the scratch block."""
    row = DecodeRow(0, Prompt(0, array("q", [0, 0]), blocks=[SCRATCH]))
    return RowPrefill(row, 0, 1)


def _make_prefill(row: DecodeRow) -> RowPrefill:
    """Make the prefill of a row that is about to run."""
    shared = row.prompt.length - 1
    # The row's own segment holds the prompt's last token and the generated tokens except the newest.
    return RowPrefill(row, shared + row.cached if row.prompt.holders else 0, shared + len(row.tokens))
