"""What is not used any more is freed at once: in a cycle of references it would wait for the garbage collector."""

import gc
from collections.abc import Iterator

import pytest
import torch

from realrl.families.shape import ModelShape
from realrl.plan.placement import Mesh, Placement, Strategy
from realrl.program.memory import StoredModel
from tests.planner.lone_rank import LoneRank, Sequences, nobody_else

SHAPE = ModelShape(
    vocab_size=300, hidden_size=64, intermediate_size=96, layers=2, heads=4, kv_heads=2, head_dim=16
)


@pytest.fixture
def garbage() -> Iterator[list[object]]:
    """What only the garbage collector would free, once the test has asked it to."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    yield gc.garbage
    gc.set_debug(0)
    gc.garbage.clear()
    gc.enable()


@pytest.mark.parametrize("kind", ["train", "infer", "generate"])
@pytest.mark.parametrize("tp", [1, 2])
def test_models_and_packed_weights_need_no_garbage_collector(
    kind: str, tp: int, garbage: list[object]
) -> None:
    model, strategy = StoredModel(SHAPE, "lm", "float32", True), Strategy(tp=tp)
    rank = LoneRank(model, Placement(Mesh(0, tp), strategy), 0)
    sequences = Sequences.of((12, 20), model)
    with nobody_else():
        if kind == "generate":
            rank.generate(sequences, 8)
        else:
            getattr(rank, kind)(sequences)
    del rank
    gc.collect()
    tensors = (found for found in garbage if isinstance(found, torch.Tensor))
    assert [found.shape for found in tensors if found.numel() > SHAPE.hidden_size] == []
