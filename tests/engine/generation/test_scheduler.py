"""Scheduler of continuous batching: whatever comes, blocks are owned once, and every row is completed."""

from array import array
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from realrl.engine.generation.scheduler import SCRATCH, BlockPool, DecodeRow, DecodeTurn, Prompt, Scheduler
from realrl.layout.kv_blocks import BLOCK_TOKENS, CacheSize, count_blocks, count_prompt_blocks, size_cache


@dataclass
class Call:
    """A generate call, whose continuations end where it says."""

    prompts: list[int]
    """Lengths."""
    lengths: list[list[int]]
    """Of the continuations of each prompt."""
    new_tokens: int
    capacity: int
    batches: int
    steps: int
    prefill_tokens: int
    given: int = 0
    """Number of tokens that an environment gives before each turn of the model; 0 for no environment."""
    turn: int = 1
    """Number of tokens of a turn of the model, with an environment."""
    slow: int = 1
    """An environment answers a row once this many turns of a decode batch have been planned."""
    log: list[object] = field(default_factory=list)
    prefilled: int = 0
    """Number of tokens that were prefilled."""

    @property
    def size(self) -> CacheSize:
        return size_cache(
            self.capacity,
            prompt_blocks=sum(map(count_prompt_blocks, self.prompts)),
            longest_prompt=max(self.prompts),
            rows=sum(map(len, self.lengths)),
            new_tokens=self.new_tokens,
        )

    def rows(self) -> dict[DecodeRow, int]:
        rows = {}
        for number, (length, ends) in enumerate(zip(self.prompts, self.lengths, strict=True)):
            prompt = Prompt(number, array("q", [0] * length))
            rows |= {
                DecodeRow(len(rows) + i, prompt): min(end, self.new_tokens) for i, end in enumerate(ends)
            }
        return rows

    def run(self) -> tuple[dict[DecodeRow, int], Scheduler]:
        """Run it; `stored` maps each written place of the cache to the row or prompt that owns it, and to the
        token's position."""
        rows = self.rows()
        scheduler = Scheduler(
            rows,
            self.size,
            batches=self.batches,
            new_tokens=self.new_tokens,
            steps=self.steps,
            prefill_tokens=self.prefill_tokens,
            waiting=self.given > 0,
        )
        waits = dict.fromkeys(rows, self.slow)

        def answer() -> None:
            resumed = []
            for row in rows:
                if row not in scheduler._away:
                    waits[row] = self.slow
                    continue
                waits[row] -= 1
                if waits[row] <= 0 and len(row.tokens) + self.given >= rows[row]:
                    scheduler.finish(row)
                elif waits[row] <= 0:
                    row.give([0] * self.given)
                    resumed.append(row)
            scheduler.resume(resumed)

        turns = [scheduler.plan(i, answer) for i in range(self.batches)]
        stored: dict[tuple[int, int], tuple[object, int]] = {}
        for _ in range(10_000):
            if scheduler.done:
                return rows, scheduler
            for i in range(self.batches):
                self.log.append([row.number for row in turns[i].rows])
                self.check(turns, rows)
                self.decode(turns[i], rows, stored)
                turns[i] = scheduler.plan(i, answer)
        raise AssertionError("it never ends")

    def check(self, turns: list[DecodeTurn], rows: dict[DecodeRow, int]) -> None:
        prompts = {row.prompt for row in rows}
        owned = [block for owner in (*rows, *prompts) for block in owner.blocks]
        assert len(set(owned)) == len(owned) and all(SCRATCH < b <= self.size.blocks for b in owned)
        limit = -(-self.size.rows // self.batches)
        for turn in turns:
            assert len(turn.rows) <= limit and len(set(turn.rows)) == len(turn.rows)
            numbers = [row.prompt.number for row in turn.rows]
            assert numbers == sorted(numbers), "rows of a prompt are neighbours"
            for row in turn.rows:
                needed = min(len(row.tokens) + turn.steps, self.new_tokens)
                assert len(row.blocks) >= count_blocks(needed) and len(
                    row.prompt.blocks
                ) == count_prompt_blocks(row.prompt.length)

    def decode(
        self,
        turn: DecodeTurn,
        ends: dict[DecodeRow, int],
        stored: dict[tuple[int, int], tuple[object, int]],
    ) -> None:
        tokens = [prefill.tokens for prefill in turn.prefills]
        assert all(tokens) and (len(tokens) < 2 or sum(tokens) <= self.prefill_tokens)
        self.prefilled += sum(tokens)
        for prefill in turn.prefills:
            row = prefill.row
            for position in range(prefill.first, prefill.length):
                owner, place = place_of(row, position)
                stored[place] = owner, position
        for row in turn.rows:
            # All that a row attends to has been stored, and nothing else since.
            for position in range(row.prompt.length - 1 + len(row.tokens)):
                owner, place = place_of(row, position)
                assert stored[place] == (owner, position)
            for _ in range(turn.steps):
                owner, place = place_of(row, row.prompt.length - 1 + len(row.tokens))
                stored[place] = owner, row.prompt.length - 1 + len(row.tokens)
                row.tokens.append(0)
                row.logprobs.append(0.0)
                if self.given and len(row.tokens) in (row.turn_start + self.turn, ends[row]):
                    row.away = True
                    break
                if len(row.tokens) == ends[row]:
                    row.done = True
                    break


def place_of(row: DecodeRow, position: int) -> tuple[object, tuple[int, int]]:
    """The owner and the place in the cache of a token of a row."""
    shared = row.prompt.length - 1
    owner = row.prompt if position < shared else row
    block, offset = divmod(position if position < shared else position - shared, BLOCK_TOKENS)
    return owner, (owner.blocks[block], offset)


CALLS = st.builds(
    Call,
    prompts=st.shared(st.lists(st.integers(1, 70), min_size=1, max_size=6), key="prompts"),
    lengths=st.shared(st.lists(st.integers(1, 70), min_size=1, max_size=6), key="prompts").flatmap(
        lambda prompts: st.lists(
            st.lists(st.integers(1, 60), min_size=1, max_size=6), min_size=len(prompts), max_size=len(prompts)
        )
    ),
    new_tokens=st.integers(1, 60),
    capacity=st.integers(1, 1500),
    batches=st.integers(1, 3),
    steps=st.sampled_from([1, 4, 16]),
    prefill_tokens=st.sampled_from([1, 60, 4096]),
    given=st.sampled_from([0, 1, 7]),
    turn=st.integers(1, 20),
    slow=st.sampled_from([0, 1, 5]),
)


@settings(max_examples=300, deadline=None)
@given(CALLS)
def test_every_row_is_completed_and_all_blocks_return(call: Call) -> None:
    rows, scheduler = call.run()
    # With an environment, a row is complete when its answer has no room.
    assert all(end - call.given <= len(row.tokens) <= end and row.done for row, end in rows.items())
    assert scheduler._pool.free == call.size.blocks
    assert not any(row.blocks for row in rows)


@settings(max_examples=50, deadline=None)
@given(CALLS)
def test_decisions_depend_on_nothing_but_lengths(call: Call) -> None:
    call.run()
    first = list(call.log)
    call.log.clear()
    call.run()
    assert call.log == first


@settings(max_examples=100, deadline=None)
@given(CALLS)
def test_nothing_is_preempted_where_the_cache_holds_everything(call: Call) -> None:
    call.capacity = 1 << 20
    rows, _ = call.run()
    if call.given:
        # What an environment gives is prefilled once. A prompt may be prefilled again when its other rows are done.
        prompts = sum(row.prompt.length - 1 for row in rows)
        assert call.prefilled <= prompts + sum(len(row.given) * call.given for row in rows)
        return
    for number in range(sum(map(len, call.lengths))):
        for batch in range(call.batches):
            turns = "".join("x" if number in rows else "." for rows in call.log[batch :: call.batches])
            assert "." not in turns.strip("."), "a row runs until it is done"


def test_a_full_pool_preempts_the_youngest_rows_and_prefills_them_again() -> None:
    call = Call([17, 17, 17], [[48], [48], [48]], 48, 16 * 6, 1, 1, 4096)
    rows = call.rows()
    scheduler = Scheduler(rows, CacheSize(6, 3), batches=1, new_tokens=48, steps=1, prefill_tokens=4096)
    first, second, third = rows
    turn = scheduler.plan(0)
    assert list(turn.rows) == [first, second] and [p.tokens for p in turn.prefills] == [16, 16]
    preempted = []
    for _ in range(200):
        for row in turn.rows:
            row.tokens.append(0)
            row.done = len(row.tokens) == 48
        before, turn = turn, scheduler.plan(0)
        preempted += [row for row in before.rows if row not in turn.rows and not row.done]
        if second in turn.rows and second not in before.rows:
            # Its prompt, and all that it has generated but for the newest token.
            assert next((p.row, p.first, p.tokens) for p in turn.prefills) == (
                second,
                0,
                16 + len(second.tokens),
            )
        if scheduler.done:
            break
    assert second in preempted and first not in preempted
    assert all(row.done and len(row.tokens) == 48 for row in (first, second, third))


def test_the_pool_is_taken_from_in_a_fixed_order() -> None:
    pool = BlockPool(4)
    assert pool.take(2) == [1, 2]
    pool.release([1, 2])
    assert pool.take(3) == [1, 2, 3] and pool.free == 1


def test_the_cache_is_as_large_as_the_longest_row_and_no_larger_than_all_rows() -> None:
    def size(capacity: int) -> CacheSize:
        return size_cache(capacity, prompt_blocks=6, longest_prompt=33, rows=12, new_tokens=40)

    assert size(1) == CacheSize(2 + 3, 2)
    assert size(1 << 20) == CacheSize(6 + 12 * 3, 12)
    assert size(20 * BLOCK_TOKENS).blocks == 20
