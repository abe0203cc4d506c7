"""Layout of a model: the regions that each rank of a placement holds."""

from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from realrl.families.registry import model_tensors
from realrl.families.shape import Head, ModelShape
from realrl.families.tensors import Axis, Place, TensorSpec
from realrl.layout.ranges import axis_elements, padded_vocabulary, query_heads, stage_layers
from realrl.layout.region import Region
from realrl.plan.placement import Placement


@dataclass(frozen=True)
class LocalTensor:
    """A tensor as one rank stores it.

    `shape` is allocated; `region.size`, the part of the global tensor that fills it from the first row on,
    has as many columns and at most as many rows: fewer only where a vocabulary is padded.
    """

    spec: TensorSpec
    """The global tensor."""
    region: Region
    shape: tuple[int, ...]

    @property
    def stored(self) -> TensorSpec:
        """Description of the tensor in its allocated shape."""
        return replace(self.spec, shape=self.shape)

    @property
    def numel(self) -> int:
        """Number of allocated elements."""
        return prod(self.shape)


@dataclass(frozen=True)
class Layout:
    """A model under a placement; make one with `build_layout`, which checks that the two fit together."""

    shape: ModelShape
    head: Head
    placement: Placement
    subset: tuple[TensorSpec, ...] | None = None
    """Global tensors of the one parameter set that is laid out; None for the whole model."""

    def tensors(self, rank: int) -> tuple[LocalTensor, ...]:
        """List the local tensors of a global rank in storage order; none for a rank outside the mesh."""
        placement = self.placement
        if rank not in placement.ranks:
            return ()
        return self._shards[placement.pp_index(rank)][placement.tp_index(rank)]

    @cached_property
    def specs(self) -> tuple[TensorSpec, ...]:
        """All global tensors in storage order."""
        return model_tensors(self.shape, self.head) if self.subset is None else self.subset

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
        """Local tensors of each stage and TP rank; the same on all data-parallel replicas."""
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


def build_layout(
    shape: ModelShape, head: Head, placement: Placement, subset: tuple[TensorSpec, ...] | None = None
) -> Layout:
    """Lay out a model, or a subset of its tensors, under a placement.

    Raises UserError for more pipeline stages than layers and for more tensor ranks than attention heads.
    """
    stage_layers(shape.layers, placement.strategy.pp)
    query_heads(shape, placement.strategy.tp, 0)
    return Layout(shape, head, placement, subset)


def local_tensor(shape: ModelShape, spec: TensorSpec, tp: int, t: int) -> LocalTensor:
    """Compute the part of a global tensor on TP rank `t`, sharded as in Megatron-LM (arXiv 1909.08053)."""
    offset, size = [0] * len(spec.shape), list(spec.shape)
    stored = list(spec.shape)
    if spec.partition is not None:
        dim = spec.partition.dim
        part = axis_elements(shape, spec.partition.axis, tp, t)
        offset[dim] = part.start
        size[dim] = stored[dim] = len(part)
        if spec.partition.axis is Axis.VOCABULARY:
            stored[dim] = padded_vocabulary(shape, tp)
    return LocalTensor(spec=spec, region=Region(spec.name, tuple(offset), tuple(size)), shape=tuple(stored))
