"""Model shard of one TP rank, computed without the other ranks."""

from dataclasses import dataclass

import torch
from torch import Tensor

from realrl.engine.model import Model
from realrl.engine.parallel_groups import ParallelGroups
from realrl.families.shape import Head, ModelShape
from realrl.families.tensors import Init
from realrl.layout.layout import build_layout
from realrl.layout.shard import Shard
from realrl.model.arithmetic.ops import Products
from realrl.model.group import Group, make_single_rank_group
from realrl.plan.placement import Mesh, Placement, Strategy


@dataclass(frozen=True)
class _Silent(Group):
    """Group of TP ranks of which only this one exists: collectives return its own part."""

    def gather_columns(self, part: Tensor, columns: int) -> Tensor:
        """Repeat the columns as often as there would be ranks."""
        width = -(-columns // self.size)
        return part.repeat(1, -(-width * self.size // part.shape[1]))[:, :columns].contiguous()


def make_tensor_rank(
    shape: ModelShape,
    head: Head,
    tp: int,
    *,
    layers: int,
    dtype: torch.dtype,
    device: torch.device,
    products: Products,
) -> Model:
    """Make a model of `layers` layers with fresh weights of the largest of `tp` TP ranks.

    Where it would communicate with the others it continues with its own data: it takes the time of the arithmetic,
    and its results mean nothing.
    """
    shape = shape.with_layers(layers)
    placement = Placement(Mesh(0, tp), Strategy(tp=tp))
    rank = max(range(tp), key=lambda t: (len(Shard(shape, head, tp, t).queries), -t))
    single = make_single_rank_group(rank)
    tensor = _Silent(placement.ranks, rank) if tp > 1 else single
    groups = ParallelGroups(
        data=single, tensor=tensor, pipeline=single, reverse_pipeline=single, mesh=single, embedding=None
    )
    layout = build_layout(shape, head, placement)
    model = Model(layout, rank, groups, dtype=dtype, device=device, products=products)
    # Numbers like those of a model, drawn where they are needed: on a CPU it would take minutes for a large one.
    for part in model.sets.values():
        part.buffer.data.normal_(0.0, shape.init_std)
    for spec in model.parameters.tensors:
        if spec.init in (Init.ONES, Init.ZEROS):
            model.parameters[spec.name].fill_(float(spec.init is Init.ONES))
    return model
