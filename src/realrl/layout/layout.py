"""Layout of a model: the regions that each rank of a placement holds."""

from dataclasses import dataclass
from functools import cached_property

from realrl.families.shape import Head, ModelShape
from realrl.families.tensors import EMBEDDING, LM_HEAD, SCALAR_HEAD, TensorSpec, model_tensors
from realrl.layout.ranges import feed_forward, kv_heads, query_heads, stage_layers, vocabulary
from realrl.layout.ranges import padded_vocabulary as padded
from realrl.layout.region import Region
from realrl.plan.placement import Placement

_ENDS = ("model.norm.weight", SCALAR_HEAD, LM_HEAD)


@dataclass(frozen=True)
class LocalTensor:
    """A tensor as one rank stores it.

    `shape` is allocated; `region.size`, the part of the global tensor that fills it from the first row on,
    has as many columns and at most as many rows: fewer only where a vocabulary is padded.
    """

    region: Region
    shape: tuple[int, ...]

    @property
    def stored(self) -> TensorSpec:
        """Name and allocated shape."""
        return TensorSpec(self.region.tensor, self.shape)


@dataclass(frozen=True)
class Layout:
    """A model under a placement; make one with `build_layout`, which checks that the two fit together."""

    shape: ModelShape
    head: Head
    placement: Placement

    def tensors(self, rank: int) -> tuple[LocalTensor, ...]:
        """List the local tensors of a global rank in storage order; none for a rank outside the mesh."""
        placement = self.placement
        if rank not in placement.ranks:
            return ()
        return self._shards[placement.pp_index(rank)][placement.tp_index(rank)]

    @cached_property
    def specs(self) -> tuple[TensorSpec, ...]:
        """All global tensors in storage order."""
        return model_tensors(self.shape, self.head)

    @cached_property
    def stages(self) -> tuple[tuple[int, ...], ...]:
        """Pipeline stages that hold each global tensor."""
        last = self.placement.strategy.pp - 1
        of_layer = {
            layer: (stage,)
            for stage, layers in enumerate(stage_layers(self.shape.layers, last + 1))
            for layer in layers
        }
        twice = self.shape.tied_embeddings and self.head == "lm" and last > 0
        ends = dict.fromkeys(_ENDS, (last,)) | {EMBEDDING: (0, last) if twice else (0,)}
        return tuple(ends[spec.name] if spec.layer is None else of_layer[spec.layer] for spec in self.specs)

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


def build_layout(shape: ModelShape, head: Head, placement: Placement) -> Layout:
    """Lay out a model under a placement.

    Raises UserError for more pipeline stages than layers and for more tensor ranks than attention heads.
    """
    stage_layers(shape.layers, placement.strategy.pp)
    query_heads(shape, placement.strategy.tp, 0)
    return Layout(shape, head, placement)


def local_tensor(shape: ModelShape, spec: TensorSpec, tp: int, t: int) -> LocalTensor:
    """Compute the part of a global tensor on TP rank `t`, sharded as in Megatron-LM (arXiv 1909.08053)."""
    name = spec.name.split(".")[-2]
    if name in ("embed_tokens", "lm_head"):
        rows = vocabulary(shape, tp, t)
        region = Region(spec.name, (rows.start, 0), (len(rows), spec.shape[1]))
        return LocalTensor(region, (padded(shape, tp), spec.shape[1]))
    offset, size = [0] * len(spec.shape), list(spec.shape)
    if name in _SPLIT:
        dim, share, per_head = _SPLIT[name]
        part, width = share(shape, tp, t), shape.head_dim if per_head else 1
        offset[dim], size[dim] = part.start * width, len(part) * width
    return LocalTensor(Region(spec.name, tuple(offset), tuple(size)), tuple(size))


_SPLIT = {
    "q_proj": (0, query_heads, True),
    "k_proj": (0, kv_heads, True),
    "v_proj": (0, kv_heads, True),
    "o_proj": (1, query_heads, True),
    "gate_proj": (0, feed_forward, False),
    "up_proj": (0, feed_forward, False),
    "down_proj": (1, feed_forward, False),
}
"""Name of a tensor -> sharded dimension, its range on a TP rank, and whether that range counts heads."""
