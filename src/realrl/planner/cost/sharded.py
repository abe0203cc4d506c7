"""Time of gathering parameters and reducing gradients section by section, under ZeRO-2 and ZeRO-3. A section is the
embedding, a layer or the head."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from realrl.layout.ranges import virtual_stage_layers
from realrl.planner.cost.call_context import CallContext
from realrl.planner.memory.gathered import GatheredMemory, SectionBytes
from realrl.planner.workload.shard_sizes import KindSizes
from realrl.program.arrays import Bools, Floats, Ints, Real


@dataclass(frozen=True, kw_only=True)
class SectionSeconds:
    """Seconds that a device computes a section for one chunk, without communication between data-parallel ranks."""

    layers: Sequence[Real]
    """A layer of each kind (`LocalSizes.kinds`)."""
    layers_backward: Sequence[Real] = ()
    head_backward: Real = 0.0


@dataclass(frozen=True)
class ShardedTraffic:
    """Exposed time of the collectives under ZeRO-2 and ZeRO-3, in seconds, [stages, strategies].

    While a device computes a layer, it gathers the next layer and reduces the gradients of the layer before. The
    share `overlap` of the computing time can hide these collectives.
    """

    context: CallContext

    def forward(self, seconds: SectionSeconds) -> Floats:
        """Compute the seconds that a chunk's forward pass waits for parameters.

        Nothing hides gathering the embedding and the first layer. Computing a layer hides gathering the next
        section. The model assumes that the next layer is of the same kind.
        """
        sizes = self._bytes
        gathers = [self._gather(section) for section in self._sections]
        hidden = [layer * self.context.overlap for layer in seconds.layers]
        exposed = [np.maximum(0.0, a - b) for a, b in zip(gathers, hidden, strict=True)]
        first = self._pick(gathers, self._first_layers) - self._pick(exposed, self._first_layers)
        waits = first + sum(counts * each for counts, each in zip(self._counts, exposed, strict=True))
        waits = waits + np.where(self._first, self._gather(sizes.embedding_section), 0.0)
        head = np.maximum(0.0, self._gather(sizes.head_section) - self._pick(hidden, self._last_layers))
        return waits + np.where(self._last, head, 0.0)

    def backward(self, seconds: SectionSeconds) -> Floats:
        """Compute the seconds that a chunk's backward pass waits, through all layers that gradients flow
        through."""
        sizes, overlap = self._bytes, self.context.overlap
        gathers, reductions = (
            [move(section) for section in self._sections] for move in (self._gather, self._reduce)
        )
        counts = self._count_differentiated()
        gather, reduce = self._pick(gathers, self._last_layers), self._pick(reductions, self._first_updated)
        head = np.where(self._last, self._reduce(sizes.head_section), 0.0)
        embedding = np.where(self._first, self._reduce(sizes.embedding_section), 0.0)
        beside_head = np.where(self._last, seconds.head_backward * overlap, 0.0)
        waits = np.maximum(0.0, gather - beside_head)
        # Computing layers can hide all gathers except the first, and all reductions except the last.
        traffic = head - gather - reduce
        computed: Real = 0.0
        for number, on_stage in enumerate(counts):
            traffic = traffic + on_stage * (gathers[number] + reductions[number])
            computed = computed + on_stage * seconds.layers_backward[number]
        waits = waits + np.maximum(0.0, traffic - computed * overlap) + reduce
        return np.where(sum(counts) > 0, waits, head) + embedding

    def spread(self) -> Floats:
        """Compute the seconds to all-gather updated parameters under ZeRO-2, which keeps all parameters on every
        rank. Under ZeRO-3 ranks keep only their own rows, so the time is 0."""
        counts = self._count_differentiated()
        if self.context.strategies.zero != 2:
            return np.zeros_like(counts[0], dtype=np.float64)
        # Gradients are float32, so the parameters of a section take this fraction of its gradients' bytes.
        sizes, width = self._bytes, self.context.timing.element_bytes / 4

        def spread(section: SectionBytes) -> Floats:
            return self._on_rings("all_gather", section, lambda part: width * part.gradients)

        ends = np.where(self._first, spread(sizes.embedding_section), 0.0)
        ends = ends + np.where(self._last, spread(sizes.head_section), 0.0)
        layers = zip(counts, self._sections, strict=True)
        return ends + sum(on_stage * spread(section) for on_stage, section in layers)

    def host(self, kind: KindSizes, *, backward: bool) -> float:
        """Compute the seconds that the host takes to launch the collectives of a layer.

        Each parameter has a collective of its own: an all-gather under ZeRO-3, and in the backward pass a
        reduce-scatter of its gradient.
        """
        rounds = int(self.context.strategies.zero == 3) + int(backward)
        section = self._bytes.find_layer_section(kind)
        tensors = section.tensors + (0 if section.experts is None else section.experts.tensors)
        return rounds * tensors * self.context.collective_host

    @cached_property
    def _kinds(self) -> tuple[KindSizes, ...]:
        return self.context.timing.sizes.kinds

    @cached_property
    def _sections(self) -> list[SectionBytes]:
        """Bytes of a layer of each kind."""
        return [self._bytes.find_layer_section(kind) for kind in self._kinds]

    @cached_property
    def _counts(self) -> list[Ints]:
        """Number of layers of each kind on each stage."""
        return [kind.count(self.context.strategies.stages) for kind in self._kinds]

    def _count_differentiated(self) -> list[Ints]:
        """Count the layers of each kind on each stage that gradients flow through."""
        within = self.context.timing.sizes.differentiated_layers
        return [kind.count(self.context.strategies.stages, within=within) for kind in self._kinds]

    @cached_property
    def _first_layers(self) -> Ints:
        return self._number_kinds(lambda start, stop: start)

    @cached_property
    def _last_layers(self) -> Ints:
        return self._number_kinds(lambda start, stop: stop - 1)

    @cached_property
    def _first_updated(self) -> Ints:
        first = self.context.timing.sizes.differentiated_layers.start
        return self._number_kinds(lambda start, stop: min(max(start, first), stop - 1))

    def _number_kinds(self, layer: Callable[[int, int], int]) -> Ints:
        """Find the number of the kind of one layer of each stage, [stages, strategies]. `layer` returns this layer,
        given the first layer of a stage and the end of its last run."""
        model = self.context.timing.sizes.shape.layers

        def of(pp: int, vpp: int) -> list[int]:
            stages = virtual_stage_layers(model, pp, vpp)
            layers = [layer(runs[0].start, runs[-1].stop) for runs in stages]
            return [next(i for i, kind in enumerate(self._kinds) if n in kind.layers) for n in layers]

        return self.context.strategies.stages.tabulate(of)

    @staticmethod
    def _pick(of_kinds: Sequence[Real], numbers: Ints) -> Floats:
        """Pick, for each stage and strategy, the number of the kind with the given number."""
        wide = [np.broadcast_to(np.asarray(of), numbers.shape) for of in of_kinds]
        return np.asarray(np.choose(numbers, wide))

    @cached_property
    def _bytes(self) -> GatheredMemory:
        timing = self.context.timing
        return GatheredMemory(timing.sizes, self.context.strategies, timing.element_bytes)

    @property
    def _stage(self) -> Ints:
        return np.arange(len(self.context.layers))[:, None]

    @property
    def _first(self) -> Bools:
        return self._stage == 0

    @property
    def _last(self) -> Bools:
        return self._stage == self.context.strategies.pp - 1

    def _gather(self, section: SectionBytes) -> Floats:
        return self._on_rings("all_gather", section, lambda part: part.parameters)

    def _reduce(self, section: SectionBytes) -> Floats:
        return self._on_rings("reduce_scatter", section, lambda part: part.gradients)

    def _on_rings(
        self,
        kind: Literal["all_gather", "reduce_scatter"],
        section: SectionBytes,
        count: Callable[[SectionBytes], Real],
    ) -> Floats:
        """Seconds of a section's collectives: those of ranks with the same parameters, and those of ranks with the
        same experts."""
        rings, experts = self.context.network.group, section.experts
        if experts is None:
            return self._each(getattr(rings("copies"), kind), section.tensors, count(section))
        others = count(section) - count(experts)
        seconds = self._each(getattr(rings("copies"), kind), section.tensors, others)
        return seconds + self._each(getattr(rings("expert_copies"), kind), experts.tensors, count(experts))

    @staticmethod
    def _each(collective: Callable[[Real], Real], count: int, number_bytes: Real) -> Floats:
        """Seconds of one collective per parameter of a section, if all `count` parameters have the same size."""
        return np.where(np.asarray(number_bytes) != 0, count * collective(number_bytes / count), 0.0)
