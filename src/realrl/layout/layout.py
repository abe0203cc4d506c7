"""The layout of a model: which regions each rank of a placement holds."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby

from realrl.families.registry import model_tensors
from realrl.families.shape import Head, ModelShape
from realrl.families.tensors import Place, TensorSpec, group_specs
from realrl.layout.limits import pad_elements
from realrl.layout.local_tensors import LocalTensor, cut_rows, local_tensor
from realrl.layout.ranges import check_experts, query_heads, virtual_stage_layers
from realrl.plan.axes import Divided, axes_dividing
from realrl.plan.placement import Placement


@dataclass(frozen=True)
class Run:
    """Tensors that a rank stores back to back, and the padding after them."""

    tensors: tuple[LocalTensor, ...]
    replicas: int
    """Number of ranks that store the same tensors. Padding lets them divide each bucket equally."""

    @cached_property
    def elements(self) -> int:
        """Number of elements without padding."""
        return sum(tensor.numel for tensor in self.tensors)

    @property
    def size(self) -> int:
        """Number of elements with padding."""
        return pad_elements(self.elements, self.replicas)


@dataclass(frozen=True)
class Layout:
    """A model under a placement. `build_layout` makes a layout, and checks that model and placement fit
    together."""

    shape: ModelShape
    head: Head
    placement: Placement
    subset: tuple[TensorSpec, ...] | None = None
    """Global tensors of the parameter set that is laid out; None for the whole model."""
    _known: dict[tuple[bool, tuple[int, ...]], tuple[LocalTensor, ...]] = field(
        init=False, default_factory=dict, compare=False, repr=False
    )
    """Cache of the tensors that ranks store (True) or compute with (False). The second part of the key is a rank's
    coordinates on the axes that determine these tensors."""

    def tensors(self, rank: int) -> tuple[LocalTensor, ...]:
        """List the tensors that a global rank stores, in storage order; none for a rank outside the mesh."""
        placement = self.placement
        gathered = self.gathered_tensors(rank)
        if not (gathered and placement.strategy.shards_parameters):
            return gathered
        key = True, (rank,)
        if key not in self._known:
            self._known[key] = tuple(
                part for stack in group_stacks(gathered) for part in self.cut_stored_rows(stack, rank)
            )
        return self._known[key]

    def gathered_tensors(self, rank: int) -> tuple[LocalTensor, ...]:
        """List the tensors that a global rank computes with. They differ from `tensors` only under ZeRO-3, which
        stores only some rows of them on each rank."""
        placement = self.placement
        if rank not in placement.ranks:
            return ()
        cut, folded = axes_dividing(Divided.LAYERS, Divided.MATRICES), axes_dividing(Divided.EXPERTS)
        of_experts = self._experts.coordinates(rank, folded)
        key = False, placement.coordinates(rank, cut) + of_experts
        if key not in self._known:
            stage = placement.stage(rank)
            tensors = [
                self.cut(spec, rank)
                for spec, stages in zip(self.specs, self.stages, strict=True)
                if stage in stages and self.holds(spec, rank)
            ]
            if placement.strategy.ep > 1:
                # Experts come last, because other ranks than those of the other tensors have copies of them.
                tensors.sort(key=lambda tensor: tensor.spec.expert is not None)
            self._known[key] = tuple(tensors)
        return self._known[key]

    def runs(self, rank: int) -> tuple["Run", ...]:
        """Divide the tensors that a rank stores, in storage order, by the ranks that store the same."""
        tensors = self.tensors(rank)
        if self.placement.strategy.ep == 1:
            return (Run(tensors, self.placement.strategy.replicas),)
        others = tuple(tensor for tensor in tensors if tensor.spec.expert is None)
        return (
            Run(others, self.placement.strategy.replicas),
            Run(tensors[len(others) :], self._experts.strategy.replicas),
        )

    def count_stored(self, rank: int) -> tuple[int, int]:
        """Count the elements that a rank stores, with padding, and the elements of its shares of all buckets. This
        is much faster than to add up `runs`, which lists tens of thousands of tensors of a large mixture."""
        stage, numbers = self.placement.stage(rank), Counter[Placement]()
        for stack, on_stages in self._alike:
            held = [self.cut(spec, rank) for spec in stack if self.holds(spec, rank)]
            if held and on_stages[stage]:
                stored = sum(tensor.numel for tensor in self.cut_stored_rows(held, rank))
                numbers[self.placement_of(stack[0])] += on_stages[stage] * stored
        runs = [(number, placement.strategy.replicas) for placement, number in numbers.items()]
        sizes = [pad_elements(number, replicas) for number, replicas in runs]
        return sum(sizes), sum(size // replicas for size, (_, replicas) in zip(sizes, runs, strict=True))

    def holds(self, spec: TensorSpec, rank: int) -> bool:
        """Check whether a rank on one of a tensor's stages computes with the tensor or a part of it. It does not if
        the tensor belongs to an expert of other ranks."""
        ep = self.placement.strategy.ep
        if spec.expert is None or ep == 1:
            return True
        assert self.shape.mixture is not None, "only mixtures have experts"
        own = self.shape.mixture.experts // ep
        return spec.expert // own == self._experts.index(rank, *axes_dividing(Divided.EXPERTS))

    def placement_of(self, spec: TensorSpec) -> Placement:
        """Return the placement that determines which ranks hold a tensor: the experts' own, or that of all other
        tensors."""
        return self.placement if spec.expert is None else self._experts

    @cached_property
    def _experts(self) -> Placement:
        return self.placement.for_experts()

    def cut(self, spec: TensorSpec, rank: int) -> LocalTensor:
        """Cut out the part of a global tensor that a rank computes with; the rank must be on one of the tensor's
        stages."""
        if spec.partition is None:
            return local_tensor(self.shape, spec, 1, 0)
        axis, placement = spec.partition.axis, self.placement_of(spec)
        parts, index = placement.strategy.degrees[axis], placement.index(rank, axis)
        return local_tensor(self.shape, spec, parts, index)

    def cut_stored_rows(self, stack: Sequence[LocalTensor], rank: int) -> Sequence[LocalTensor]:
        """Cut out the rows of a parameter that a rank stores: all rows, unless ZeRO-3 shards parameters."""
        placement = self.placement_of(stack[0].spec)
        if not placement.strategy.shards_parameters:
            return stack
        return cut_rows(stack, placement.strategy.copies, placement.copy_index(rank))

    def list_parts(self, spec: TensorSpec) -> list[LocalTensor]:
        """List the parts into which ranks divide a global tensor; a single part if it has no partition."""
        if spec.partition is None:
            return [local_tensor(self.shape, spec, 1, 0)]
        parts = self.placement_of(spec).strategy.degrees[spec.partition.axis]
        return [local_tensor(self.shape, spec, parts, index) for index in range(parts)]

    @cached_property
    def specs(self) -> tuple[TensorSpec, ...]:
        """All global tensors in storage order."""
        return model_tensors(self.shape, self.head) if self.subset is None else self.subset

    @cached_property
    def stacks(self) -> tuple[tuple[TensorSpec, ...], ...]:
        """Global tensors in storage order, grouped by parameter of the transformer."""
        return group_specs(self.specs)

    @cached_property
    def _alike(self) -> Sequence[tuple[tuple[TensorSpec, ...], Counter[int]]]:
        """Parameters that ranks cut alike, because their tensors have the same shapes and partitions, such as one
        matrix of every layer. Each item has the tensors of the first of these parameters, and the number of them on
        each stage."""
        found: dict[object, tuple[tuple[TensorSpec, ...], Counter[int]]] = {}
        stages = iter(self.stages)
        for stack in self.stacks:
            kind = tuple((spec.partition, spec.shape, spec.expert) for spec in stack)
            # All tensors of a parameter are on the same stages, so the stages of the first tensor are enough.
            on_stages, *_ = [next(stages) for _ in stack]
            found.setdefault(kind, (stack, Counter()))[1].update(on_stages)
        return tuple(found.values())

    @cached_property
    def stages(self) -> tuple[tuple[int, ...], ...]:
        """Pipeline stages that hold each tensor of `specs`."""
        strategy = self.placement.strategy
        last = strategy.pp - 1
        of_layer = {
            layer: (stage,)
            for stage, runs in enumerate(virtual_stage_layers(self.shape.layers, strategy.pp, strategy.vpp))
            for layers in runs
            for layer in layers
        }
        both = (0, last) if last > 0 else (0,)
        ends = {Place.FIRST: (0,), Place.LAST: (last,), Place.BOTH_ENDS: both}
        return tuple(
            ends[spec.place] if isinstance(spec.place, Place) else of_layer[spec.place] for spec in self.specs
        )


def group_stacks(tensors: tuple[LocalTensor, ...]) -> list[tuple[LocalTensor, ...]]:
    """Group tensors in storage order by parameter of the transformer."""
    by_parameter = groupby(tensors, key=lambda tensor: (tensor.spec.place, tensor.spec.parameter))
    return [tuple(stack) for _, stack in by_parameter]


def build_layout(
    shape: ModelShape, head: Head, placement: Placement, subset: tuple[TensorSpec, ...] | None = None
) -> Layout:
    """Lay out a model, or a subset of its tensors, under a placement. Raises UserError for more pipeline stages
    than layers, more tensor-parallel ranks than attention heads, or a degree of expert parallelism that does not
    divide the experts."""
    virtual_stage_layers(shape.layers, placement.strategy.pp, placement.strategy.vpp)
    query_heads(shape, placement.strategy.tp, 0)
    check_experts(shape, placement.strategy.ep)
    return Layout(shape, head, placement, subset)
