"""What the planner predicts of context-parallel ranks, which divide only long sequences."""

import pytest

from realrl.dataflow.call import Call, Kind
from realrl.families.sizes import SHAPES
from realrl.plan.placement import Mesh, Placement, Strategy
from realrl.planner.cluster.cluster_spec import ClusterSpec
from realrl.planner.cost.cost_model import CostModel
from realrl.planner.workload.batching import split_work
from realrl.planner.workload.workload import Workload
from realrl.program.memory import StoredModel

TRAIN = Call("actor.train", "actor", Kind.TRAIN, ("tokens",), work=("tokens",))


@pytest.mark.parametrize(
    ("lengths", "items", "divided", "exchanged"),
    [
        ((100,), 64, 0, 0),
        ((2000,), 64, 1, 1 / 3),  # two of four ranks have room
        ((4000,), 64, 1, 1),
        ((9000,), 64, 1, 1),
        ((100,), 1, 1, 1),  # other ranks would have nothing to do
        ((100,), 2, 1, 1 / 3),
        ((100, 300, 3600), 240, 0.9, 0.9),
    ],
)
def test_long_sequences_are_divided(
    lengths: tuple[int, ...], items: int, divided: float, exchanged: float
) -> None:
    work = Workload(items, lengths).work(TRAIN)
    chunks = split_work(work, Strategy(cp=4, micro_batch_tokens=4000))
    assert (chunks.divided, chunks.exchanged) == pytest.approx((divided, exchanged), abs=0.01)
    alone = split_work(work, Strategy(micro_batch_tokens=4000))
    assert (alone.divided, alone.exchanged) == (0, 0)
    assert (chunks.count, chunks.tokens, chunks.peak) == (alone.count, alone.tokens, alone.peak)


def test_short_sequences_need_no_communication() -> None:
    model = StoredModel(SHAPES["qwen2.5-7b"], "lm", "bfloat16", trained=True)
    cost = CostModel(ClusterSpec.parse("h100:1x8"))

    def predict(length: int, **degrees: int) -> float:
        workload = Workload(1 << 20 >> length.bit_length() - 1, (length,))
        place = Placement(Mesh(0, 8), Strategy(**degrees, micro_batch_tokens=1 << 18))
        return cost.call(TRAIN, model, place, workload).terms["context"]

    assert predict(1 << 14, cp=8) == 0 == predict(1 << 14, dp=8)
    assert 0 < predict(1 << 16, cp=8) < predict(1 << 18, cp=8)
