"""Data-parallel ranks get about equal work, not only equal numbers of tokens."""

import torch

from realrl.data.batch import Batch, Ragged
from realrl.dataflow.call import Call, Key, Kind
from realrl.dataflow.graph import DataflowGraph
from realrl.plan.cluster import Cluster
from realrl.plan.placement import Mesh, Placement, Strategy
from realrl.plan.plan import Plan
from realrl.runtime.worker.store import Store

TRAIN = Call("actor.train", "actor", Kind.TRAIN, ("tokens",), work=("tokens",))


def test_a_rank_with_a_long_sequence_gets_fewer_tokens() -> None:
    graph = DataflowGraph([TRAIN], [Key("tokens", "int64")])
    plan = Plan(Cluster(1, 2), {TRAIN.name: Placement(Mesh(0, 2), Strategy(dp=2))})
    rows = Ragged.of([torch.zeros(n, dtype=torch.int64) for n in (1000, *[100] * 14)])
    tokens = {}
    for attention in (0.0, 1e-3):
        store = Store(graph, plan, {"actor": attention})
        store.feed(Batch(tuple(range(15)), {"tokens": rows}))
        items = [minibatch for (minibatch,) in store.assignment(TRAIN)]
        tokens[attention] = sorted(sum(rows.lengths[i] for i in of_rank) for of_rank in items)
    assert tokens == {0.0: [1200, 1200], 1e-3: [1000, 1400]}
