"""No call of the engine can deadlock on NCCL, whatever makes its hosts wait."""

from itertools import product

import pytest

from realrl.dataflow.call import Kind
from realrl.plan.placement import Strategy
from tests.nccl.calls import record_call, record_uneven_training
from tests.nccl.simulator import check

STRATEGIES = [
    Strategy(dp=2, micro_batch_tokens=30),
    Strategy(tp=2, pp=2, micro_batch_tokens=30, sequence_parallel=True),
    Strategy(pp=2, micro_batch_tokens=20),
    Strategy(pp=3, micro_batch_tokens=30),
    Strategy(pp=4, micro_batch_tokens=12),
    Strategy(dp=2, pp=4, micro_batch_tokens=20),
    Strategy(dp=2, tp=2, pp=2, micro_batch_tokens=20),
]
INTERLEAVED = [
    Strategy(pp=2, vpp=4, micro_batch_tokens=20),
    Strategy(pp=3, vpp=2, micro_batch_tokens=30),
    Strategy(dp=2, tp=2, pp=2, vpp=2, micro_batch_tokens=20, sequence_parallel=True),
]
ZERO_BUBBLE = [
    Strategy(pp=4, micro_batch_tokens=12, zero_bubble=True),
    Strategy(dp=2, pp=4, vpp=2, micro_batch_tokens=20, zero_bubble=True),
]
SMALL_CACHES = [Strategy(pp=2, micro_batch_tokens=10), Strategy(pp=3, micro_batch_tokens=8)]
"""So small that one decode batch holds all blocks, and the others have no steps."""
DIVIDED_CACHES = [
    Strategy(cp=2, pp=2, micro_batch_tokens=30),
    Strategy(dp=2, cp=2, tp=2, micro_batch_tokens=30),
]


@pytest.mark.parametrize(
    ("kind", "strategy"),
    [
        *product((Kind.TRAIN, Kind.INFERENCE, Kind.GENERATE), STRATEGIES),
        *product((Kind.TRAIN, Kind.INFERENCE), INTERLEAVED),
        *product((Kind.TRAIN,), ZERO_BUBBLE),
        *product((Kind.GENERATE,), [*SMALL_CACHES, *DIVIDED_CACHES]),
    ],
    ids=str,
)
def test_calls_end_even_if_every_operation_makes_the_host_wait(kind: Kind, strategy: Strategy) -> None:
    check({rank: record_call(kind, strategy, rank) for rank in range(strategy.size)})


@pytest.mark.parametrize(
    ("strategy", "lengths"),
    [
        (
            Strategy(cp=2, pp=2, vpp=2, micro_batch_tokens=28, zero_bubble=True),
            (2, 12, 2, 3, 4, 5, 12, 3, 4, 3, 5, 2, 14, 5, 4, 4, 5, 3, 12, 5, 12, 12, 2, 4),
        ),
    ],
    ids=str,
)
def test_ranks_with_fewer_micro_batches_keep_the_common_order_of_messages(
    strategy: Strategy, lengths: tuple[int, ...]
) -> None:
    check(record_uneven_training(strategy, lengths))
