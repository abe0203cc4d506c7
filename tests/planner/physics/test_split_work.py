"""Micro-batches and decode batches of calls, worked out by hand."""

from dataclasses import astuple

import pytest

from realrl.families.shape import Mixture
from realrl.layout.kv_blocks import CacheSize
from realrl.plan.placement import Strategy
from realrl.planner.workload.batching import PeakChunk, split_work
from realrl.planner.workload.generation import split_generation
from realrl.planner.workload.windows import average_context, average_squares
from realrl.planner.workload.workload import CallWork, count_read_weights, count_visited_experts
from tests.planner.unit_device import SHAPE


def work(
    items: int,
    lengths: tuple[int, ...],
    answer: int = 0,
    *,
    room: int = 0,
    samples: int = 1,
    per_item: int = 1,
    minibatches: int = 1,
) -> CallWork:
    return CallWork(
        items=items,
        lengths=lengths,
        answers=(answer,) if answer else (),
        room=room or answer,
        minibatches=minibatches,
        passes=1,
        samples=samples,
        per_item=per_item,
    )


FOUR = (10, 20, 30, 40)


@pytest.mark.parametrize(
    ("of", "strategy", "count", "sequences", "peak"),
    [
        # Three sequences of 32 tokens in 100, and four chunks for ten.
        (work(10, (32,)), Strategy(micro_batch_tokens=100), 4, 2.5, PeakChunk(3, (32,))),
        (work(10, (32,)), Strategy(dp=3, micro_batch_tokens=100), 2, 2.0, PeakChunk(3, (32,))),
        # Two chunks per stage, of which none is larger than its share.
        (work(10, (32,)), Strategy(pp=2, micro_batch_tokens=1000), 4, 2.5, PeakChunk(3, (32,))),
        # Two sequences of 100 tokens have chunks of their own, and 120 others take two of 64.
        (work(8, (10, 20, 30, 100)), Strategy(micro_batch_tokens=64), 4, 2.0, PeakChunk(1, (100,))),
        # 16 sequences of 25 tokens on average: four chunks, of which the first one has the longest.
        (work(16, FOUR), Strategy(pp=2, micro_batch_tokens=200), 4, 4.0, PeakChunk(2.5, (40,))),
        # Pairs stay together: of three on a rank, 150 tokens, in chunks of 100 two.
        (
            work(12, FOUR, per_item=2, minibatches=2),
            Strategy(dp=2, micro_batch_tokens=100),
            2,
            3.0,
            PeakChunk(2 * 100 / 70, (40, 30)),
        ),
        (
            work(40, (4, 8, 12, 100)),
            Strategy(pp=2, micro_batch_tokens=120),
            11,
            40 / 11,
            PeakChunk(1.2, (100,)),
        ),
    ],
)
def test_sequences_fill_micro_batches(
    of: CallWork, strategy: Strategy, count: int, sequences: float, peak: PeakChunk
) -> None:
    found = split_work(of, strategy)
    assert found.count == count
    assert astuple(found.peak) == (pytest.approx(peak.sequences), peak.lengths)
    squares = [n * n for n in of.lengths]
    assert found.tokens == pytest.approx(sequences * sum(of.lengths) / len(of.lengths))
    assert found.squares == pytest.approx(sequences * sum(squares) / len(squares))
    assert found.peak.tokens == pytest.approx(peak.sequences * sum(peak.lengths) / len(peak.lengths))


@pytest.mark.parametrize(
    ("of", "strategy", "cpu", "cache", "passes", "peak"),
    [
        # Everything fits: eight prompts of two blocks and continuations of two.
        (
            work(8, (33,), 20),
            Strategy(micro_batch_tokens=1 << 20),
            False,
            CacheSize(32, 8),
            1,
            PeakChunk(8, (32,)),
        ),
        # Seven blocks for three rows, each of which is expected to take a block for its prompt and one of two for
        # its continuation; nine rows come one after the other.
        (
            work(12, (8,), 24),
            Strategy(micro_batch_tokens=112),
            False,
            CacheSize(7, 3),
            11,
            PeakChunk(3, (7,)),
        ),
        # Of four rows of a prompt, a quarter of its block each; those that were preempted come with new ones.
        (
            work(12, (8,), 24, samples=4),
            Strategy(micro_batch_tokens=112),
            False,
            CacheSize(7, 5),
            3,
            PeakChunk(1 + (7 + 12) / 7, (7,)),
        ),
        (
            work(24, (20, 60, 100, 300), 90, room=100, samples=3),
            Strategy(dp=2, pp=2, micro_batch_tokens=600),
            True,
            CacheSize(75, 11),
            3,
            PeakChunk(2, (299, 99)),
        ),
        # A prompt of 5,000 tokens is prefilled alone, and once more with half of its continuation.
        (
            work(64, (1000, 3000, 5000), 100),
            Strategy(micro_batch_tokens=40000),
            True,
            CacheSize(2500, 13),
            62,
            PeakChunk(1, (5049,)),
        ),
        (
            work(64, (1000, 3000, 5000), 100, room=400),
            Strategy(micro_batch_tokens=20000),
            False,
            CacheSize(1250, 6),
            62,
            PeakChunk(16384 / 4999, (4999,)),
        ),
        (
            work(6, (100,), 10, room=1000),
            Strategy(micro_batch_tokens=2400),
            True,
            CacheSize(150, 3),
            4,
            PeakChunk(1, (599,)),
        ),
    ],
)
def test_prompts_are_prefilled_as_rows_are_admitted(
    of: CallWork, strategy: Strategy, cpu: bool, cache: CacheSize, passes: int, peak: PeakChunk
) -> None:
    found = split_generation(of, strategy, cpu=cpu)
    assert found.cache == cache and found.batches == strategy.pp
    assert found.rows_per_batch == -(-cache.rows // strategy.pp)
    assert found.passes.count == passes
    assert astuple(found.passes.peak) == (pytest.approx(peak.sequences), peak.lengths)
    prompts = of.items / of.samples / strategy.dp
    lengths = [n - 1 for n in of.lengths]
    assert found.passes.tokens == pytest.approx(prompts / passes * sum(lengths) / len(lengths))
    assert found.passes.squares == pytest.approx(
        prompts / passes * sum(n * n for n in lengths) / len(lengths)
    )


def test_calls_know_the_most_that_they_may_take_at_once() -> None:
    """Of 12 items in 2 mini-batches; where rows are generated, in blocks of 16 that samples of a prompt share."""
    trained = work(12, FOUR, per_item=2, minibatches=2)
    assert (trained.longest, trained.capacity) == (80, 2 * 6 * 40)
    assert (trained.sequences, trained.mean, trained.mean_square, trained.tokens) == (24, 25, 750, 600)
    generated = work(12, (18, 33), 20, samples=3)
    assert generated.longest == 16 * (2 + 2)
    assert generated.capacity == 16 * (4 * 2 + 12 * 2)


def test_windows_hide_what_lies_before_them() -> None:
    shape = SHAPE.model_copy(update={"window": 10, "windowed_layers": (2,)})
    assert average_squares(shape, 64, 2 * 32**2) == pytest.approx(2 * 32**2 - 2 * 22**2 / 4)
    assert average_squares(shape, 64, 2 * 32**2, layers=2) == pytest.approx(2 * 32**2 - 2 * 22**2 / 2)
    assert (
        average_squares(shape, 64, 2 * 32**2, layers=1) == average_squares(SHAPE, 64, 2 * 32**2) == 2 * 32**2
    )
    assert average_squares(shape, 16, 2 * 8**2) == pytest.approx(2 * 8**2)
    assert average_context(shape, 30) == pytest.approx(30 - 20 / 4)
    assert average_context(shape, 9) == 9 and average_context(SHAPE, 30) == 30


def test_tokens_visit_and_read_experts_of_their_own() -> None:
    shape = SHAPE.model_copy(update={"family": "qwen3_moe", "mixture": Mixture(experts=8, per_token=2)})
    assert count_visited_experts(shape, 1) == 2 and count_visited_experts(SHAPE, 5) == 0
    assert count_visited_experts(shape, 2) == pytest.approx(2 + 2 * 6 / 8)
    own, block = 256 * 64 + 64 * 128 + 8 * 64, 320 * 64 + 64 * 160
    dense = 256 * 64 + 64 * 128 + block
    assert count_read_weights(shape, 2) == pytest.approx(shape.layers * (own + 3.5 * block))
    assert count_read_weights(SHAPE, 2) == SHAPE.layers * dense
    mixed = shape.model_copy(update={"dense_layers": (1,), "dense_size": 2 * shape.intermediate_size})
    layers = (shape.layers - 1) * (own + 3.5 * block) + dense + block
    assert count_read_weights(mixed, 2) == pytest.approx(layers)
