"""The bytes that programs are costed with are those that the engine allocates."""

from dataclasses import replace

import pytest
import torch

from realrl.engine.dtypes import find_torch_dtype
from realrl.engine.model import Model
from realrl.engine.parallel_groups import ParallelGroups
from realrl.engine.training.trainer import Trainer
from realrl.families.shape import Head, ModelShape
from realrl.layout.layout import build_layout
from realrl.model.group import Group, make_single_rank_group
from realrl.plan.placement import Dtype, Mesh, Placement, Strategy
from realrl.program.memory import HeldState, Memory, StoredModel
from realrl.recipe.optimizer import OptimizerConfig

SHAPE = ModelShape(
    vocab_size=67, hidden_size=12, intermediate_size=20, layers=3, heads=3, kv_heads=1, head_dim=4
)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("head", ["lm", "scalar"])
@pytest.mark.parametrize(
    "strategy",
    [
        *((1, 1, 1, 1), (5, 1, 1, 1), (2, 2, 1, 1), (1, 1, 2, 1), (4, 3, 2, 1)),
        *((5, 1, 1, 2), (4, 3, 2, 2), (5, 1, 1, 3), (4, 3, 2, 3), (40, 1, 1, 3)),
    ],
)
def test_a_rank_allocates_the_estimated_bytes(
    dtype: Dtype, head: Head, strategy: tuple[int, int, int, int]
) -> None:
    dp, tp, pp, zero = strategy
    placement = Placement(Mesh(0, dp * tp * pp), Strategy(dp=dp, tp=tp, pp=pp, zero=zero))
    memory = Memory({"actor": StoredModel(SHAPE, head, dtype, True)}, {"actor": placement}, (), {})
    for rank in {0, placement.mesh.size - 1}:
        # Groups that are never used for communication, so that one process can stand for any rank.
        group = replace(make_single_rank_group(), ranks=tuple(range(dp)), index=placement.item_index(rank))
        groups = ParallelGroups.of_single_rank(data=group, copies=group, mesh=Group((rank,), 0))
        model = Model(
            build_layout(SHAPE, head, placement),
            rank,
            groups,
            dtype=find_torch_dtype(dtype),
            device=torch.device("cpu"),
        )
        trainer = Trainer(model, OptimizerConfig())
        state = [*trainer.optimizer.persistent, *trainer.optimizer.workspace, trainer.gradients.data]
        if zero == 2:
            state.append(trainer.updated.buffer.data)
        held = memory.at_rest(rank)
        assert (
            held[HeldState("actor", placement.layout, "parameters")] == model.sets["base"].buffer.data.nbytes
        )
        assert held[HeldState("actor", placement.layout, "optimizer")] == sum(
            tensor.nbytes for tensor in state
        )
