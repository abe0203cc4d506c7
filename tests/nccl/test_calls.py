"""No call of the engine can deadlock on NCCL, whatever makes its hosts wait."""

from itertools import product

import pytest

from realrl.dataflow.call import Kind
from realrl.plan.placement import Strategy
from tests.nccl.calls import record_call
from tests.nccl.simulator import check

STRATEGIES = [
    Strategy(2, 1, 1, micro_batch_tokens=30),
    Strategy(1, 2, 2, micro_batch_tokens=30, sequence_parallel=True),
    Strategy(1, 1, 2, micro_batch_tokens=20),
    Strategy(1, 1, 3, micro_batch_tokens=30),
    Strategy(1, 1, 4, micro_batch_tokens=12),
    Strategy(2, 1, 4, micro_batch_tokens=20),
    Strategy(2, 2, 2, micro_batch_tokens=20),
]


@pytest.mark.parametrize(
    ("kind", "strategy"), [*product((Kind.TRAIN, Kind.INFERENCE, Kind.GENERATE), STRATEGIES)], ids=str
)
def test_calls_end_even_if_every_operation_makes_the_host_wait(kind: Kind, strategy: Strategy) -> None:
    check({rank: record_call(kind, strategy, rank) for rank in range(strategy.size)})
