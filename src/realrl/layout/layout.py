"""Layout of a model: the regions that each rank of a placement holds."""

from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby

from realrl.families.registry import model_tensors
from realrl.families.shape import Head, ModelShape
from realrl.families.tensors import Place, TensorSpec
from realrl.layout.local_tensors import LocalTensor, cut_rows, local_tensor
from realrl.layout.ranges import query_heads, stage_layers
from realrl.plan.placement import Placement


@dataclass(frozen=True)
class Layout:
    """A model under a placement; make one with `build_layout`, which checks that the two fit together."""

    shape: ModelShape
    head: Head
    placement: Placement
    subset: tuple[TensorSpec, ...] | None = None
    """Global tensors of the one parameter set that is laid out; None for the whole model."""
    _rows: dict[tuple[int, int, int], tuple[LocalTensor, ...]] = field(
        init=False, default_factory=dict, compare=False, repr=False
    )
    """Tensors that ranks store under ZeRO-3, by stage, TP rank and data-parallel rank, as they are asked for."""

    def tensors(self, rank: int) -> tuple[LocalTensor, ...]:
        """List the tensors that a global rank stores, in storage order; none for a rank outside the mesh."""
        placement = self.placement
        gathered = self.gathered_tensors(rank)
        if not (gathered and placement.strategy.shards_parameters):
            return gathered
        key = placement.pp_index(rank), placement.tp_index(rank), placement.dp_index(rank)
        if key not in self._rows:
            self._rows[key] = tuple(
                part
                for stack in group_stacks(gathered)
                for part in cut_rows(stack, placement.strategy.dp, key[2])
            )
        return self._rows[key]

    def gathered_tensors(self, rank: int) -> tuple[LocalTensor, ...]:
        """List the tensors that a global rank computes with: what it stores and, under ZeRO-3, all rows of it."""
        placement = self.placement
        if rank not in placement.ranks:
            return ()
        return self._shards[placement.pp_index(rank)][placement.tp_index(rank)]

    @cached_property
    def specs(self) -> tuple[TensorSpec, ...]:
        """All global tensors in storage order."""
        return model_tensors(self.shape, self.head) if self.subset is None else self.subset

    @cached_property
    def stacks(self) -> tuple[tuple[TensorSpec, ...], ...]:
        """Global tensors in storage order, by the parameter of the transformer that they are stacked in."""
        by_parameter = groupby(self.specs, key=lambda spec: (spec.place, spec.parameter))
        return tuple(tuple(specs) for _, specs in by_parameter)

    @cached_property
    def stages(self) -> tuple[tuple[int, ...], ...]:
        """Pipeline stages that hold each global tensor."""
        last = self.placement.strategy.pp - 1
        of_layer = {
            layer: (stage,)
            for stage, layers in enumerate(stage_layers(self.shape.layers, last + 1))
            for layer in layers
        }
        both = (0, last) if last > 0 else (0,)
        ends = {Place.FIRST: (0,), Place.LAST: (last,), Place.BOTH_ENDS: both}
        return tuple(
            ends[spec.place] if isinstance(spec.place, Place) else of_layer[spec.place] for spec in self.specs
        )

    @cached_property
    def _shards(self) -> tuple[tuple[tuple[LocalTensor, ...], ...], ...]:
        """Local tensors of each stage and TP rank, all rows of them; the same on all data-parallel ranks."""
        strategy = self.placement.strategy
        held = [
            [spec for spec, stages in zip(self.specs, self.stages, strict=True) if stage in stages]
            for stage in range(strategy.pp)
        ]
        return tuple(
            tuple(
                tuple(local_tensor(self.shape, spec, strategy.tp, t) for spec in specs)
                for t in range(strategy.tp)
            )
            for specs in held
        )


def group_stacks(tensors: tuple[LocalTensor, ...]) -> list[tuple[LocalTensor, ...]]:
    """Group tensors in storage order by the parameter of the transformer that they are stacked in."""
    by_parameter = groupby(tensors, key=lambda tensor: (tensor.spec.place, tensor.spec.parameter))
    return [tuple(stack) for _, stack in by_parameter]


def build_layout(
    shape: ModelShape, head: Head, placement: Placement, subset: tuple[TensorSpec, ...] | None = None
) -> Layout:
    """Lay out a model, or a subset of its tensors, under a placement.

    Raises UserError for more pipeline stages than layers and for more tensor ranks than attention heads.
    """
    stage_layers(shape.layers, placement.strategy.pp)
    query_heads(shape, placement.strategy.tp, 0)
    return Layout(shape, head, placement, subset)
