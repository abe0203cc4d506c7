"""The part of a model that one rank computes with, in terms of heads, rows and layers."""

from dataclasses import dataclass
from functools import cached_property

from realrl.families.shape import Head, ModelShape
from realrl.families.tensors import Place, TensorSpec
from realrl.layout.ranges import kv_heads, query_heads, stage_layers, virtual_stage_layers, vocabulary
from realrl.plan.placement import Placement


@dataclass(frozen=True)
class Shard:
    """Part of a model that TP rank `tp_index` (of `tp`) holds on pipeline stage `pp_index` (of `pp`). By default,
    it is the whole model."""

    shape: ModelShape
    head: Head
    tp: int = 1
    tp_index: int = 0
    pp: int = 1
    pp_index: int = 0
    ep: int = 1
    ep_index: int = 0
    """Index of this rank among the `ep` ranks that divide the experts of its stage."""
    vpp: int = 1
    """Number of virtual stages of each pipeline stage."""

    @classmethod
    def of(cls, shape: ModelShape, head: Head, placement: Placement, rank: int) -> "Shard":
        s, ep_index = placement.strategy, placement.for_experts().index(rank, "ep")
        tp_index, pp_index = placement.index(rank, "tp"), placement.stage(rank)
        return cls(shape, head, s.tp, tp_index, s.pp, pp_index, s.ep, ep_index, s.vpp)

    def holds(self, spec: TensorSpec) -> bool:
        """Check whether this rank holds a tensor or a part of it."""
        if spec.expert is not None and spec.expert not in self.experts:
            return False
        match spec.place:
            case Place.FIRST:
                return self.first
            case Place.LAST:
                return self.last
            case Place.BOTH_ENDS:
                return self.first or self.last
            case layer:
                return layer in self.layers

    def holds_whole_expert(self, spec: TensorSpec) -> bool:
        """Check whether a tensor of this rank belongs to an expert that no other TP rank computes (expert
        parallelism)."""
        return spec.expert is not None and self.ep > 1

    @property
    def first(self) -> bool:
        """Whether this is the first stage, which embeds tokens."""
        return self.pp_index == 0

    @property
    def last(self) -> bool:
        """Whether this is the last stage, which has the final norm and the head."""
        return self.pp_index == self.pp - 1

    @cached_property
    def virtual_stages(self) -> tuple[range, ...]:
        """Layers of the model on each virtual stage of this stage."""
        return virtual_stage_layers(self.shape.layers, self.pp, self.vpp)[self.pp_index]

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """Layers of the model on this stage, ascending. The place of a layer is its index among them."""
        return tuple(layer for layers in self.virtual_stages for layer in layers)

    def find_place(self, virtual: int) -> int:
        """Find the place of a virtual stage of this stage in the order in which a micro-batch passes all of them:
        the first ones of all stages, then the second ones, and so on."""
        return virtual * self.pp + self.pp_index

    def find_first_place(self, spec: TensorSpec) -> int:
        """Find the place (`find_place`) of the first virtual stage of any stage that holds a tensor."""
        match spec.place:
            case Place.FIRST | Place.BOTH_ENDS:
                return 0
            case Place.LAST:
                return self.pp * self.vpp - 1
            case layer:
                runs = stage_layers(self.shape.layers, self.pp * self.vpp)
                return next(place for place, run in enumerate(runs) if layer in run)

    def places(self, virtual: int) -> range:
        """Find the places of the layers of a virtual stage."""
        start = sum(map(len, self.virtual_stages[:virtual]))
        return range(start, start + len(self.virtual_stages[virtual]))

    def begins(self, virtual: int) -> bool:
        """Check whether a virtual stage is the first of the whole pipeline, which embeds tokens."""
        return self.first and virtual == 0

    def ends(self, virtual: int) -> bool:
        """Check whether a virtual stage is the last of the whole pipeline, which has the head."""
        return self.last and virtual == self.vpp - 1

    @cached_property
    def experts(self) -> range:
        """Experts of each layer that this rank holds whole, or its part of all of them without expert
        parallelism."""
        total = 0 if self.shape.mixture is None else self.shape.mixture.experts
        return range(total * self.ep_index // self.ep, total * (self.ep_index + 1) // self.ep)

    @cached_property
    def queries(self) -> range:
        return query_heads(self.shape, self.tp, self.tp_index)

    @cached_property
    def keys(self) -> range:
        """Key/value heads of this TP rank; neighbours may hold some of them too."""
        return kv_heads(self.shape, self.tp, self.tp_index)

    @cached_property
    def vocabulary(self) -> range:
        """Token ids whose embedding and logits are on this TP rank."""
        return vocabulary(self.shape, self.tp, self.tp_index)

    @cached_property
    def key_holders(self) -> tuple[int, ...]:
        """Number of TP ranks that hold each key/value head of this rank."""
        ranges = [kv_heads(self.shape, self.tp, t) for t in range(self.tp)]
        return tuple(sum(head in keys for keys in ranges) for head in self.keys)

    @property
    def shares_keys(self) -> bool:
        """Whether more than one TP rank holds some key/value head."""
        ranges = [kv_heads(self.shape, self.tp, t) for t in range(self.tp)]
        return sum(map(len, ranges)) > self.shape.kv_heads

    @cached_property
    def uneven_groups(self) -> tuple[int, ...] | None:
        """Index of the local key/value head that each local query head reads; None if all key/value heads serve
        equally many query heads."""
        group = self.shape.heads // self.shape.kv_heads
        reads = tuple(head // group - self.keys.start for head in self.queries)
        per_key, rest = divmod(len(reads), len(self.keys))
        regular = not rest and reads == tuple(i // per_key for i in range(len(reads)))
        return None if regular else reads
