"""Time of gathering parameters and reducing gradients section by section, under ZeRO-2 and ZeRO-3. A section is the
embedding, a layer or the head."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from realrl.planner.cost.call_context import CallContext
from realrl.planner.memory.gathered import GatheredMemory, SectionBytes
from realrl.program.arrays import Bools, Floats, Ints, Real


@dataclass(frozen=True, kw_only=True)
class SectionSeconds:
    """Seconds that a device computes a section for one chunk, without communication between data-parallel ranks."""

    layer: Real
    layer_backward: Real = 0.0
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
        section.
        """
        sizes = self._bytes
        gather, hidden = self._gather(sizes.layer_section), seconds.layer * self.context.overlap
        waits = gather + (self.context.layers - 1) * np.maximum(0.0, gather - hidden)
        waits = waits + np.where(self._first, self._gather(sizes.embedding_section), 0.0)
        head = np.maximum(0.0, self._gather(sizes.head_section) - hidden)
        return waits + np.where(self._last, head, 0.0)

    def backward(self, layers: Ints, seconds: SectionSeconds) -> Floats:
        """Compute the seconds that a chunk's backward pass waits, through the last `layers` layers of each
        stage."""
        sizes, overlap = self._bytes, self.context.overlap
        gather, reduce = self._gather(sizes.layer_section), self._reduce(sizes.layer_section)
        head = np.where(self._last, self._reduce(sizes.head_section), 0.0)
        embedding = np.where(self._first, self._reduce(sizes.embedding_section), 0.0)
        beside_head = np.where(self._last, seconds.head_backward * overlap, 0.0)
        waits = np.maximum(0.0, gather - beside_head)
        # Computing layers can hide all gathers except the first, and all reductions except the last.
        traffic = head + (layers - 1) * (gather + reduce)
        waits = waits + np.maximum(0.0, traffic - layers * seconds.layer_backward * overlap) + reduce
        return np.where(layers > 0, waits, head) + embedding

    def spread(self, layers: Ints) -> Floats:
        """Compute the seconds to all-gather updated parameters under ZeRO-2, which keeps all parameters on every
        rank.

        Training updates `layers` layers of each stage. Under ZeRO-3 ranks keep only their own rows, so the time is
        0.
        """
        if self.context.strategies.zero != 2:
            return np.zeros_like(layers, dtype=np.float64)
        # Gradients are float32, so the parameters of a section take this fraction of its gradients' bytes.
        sizes, width = self._bytes, self.context.timing.element_bytes / 4

        def spread(section: SectionBytes) -> Floats:
            return self._on_rings("all_gather", section, lambda part: width * part.gradients)

        ends = np.where(self._first, spread(sizes.embedding_section), 0.0)
        ends = ends + np.where(self._last, spread(sizes.head_section), 0.0)
        return layers * spread(sizes.layer_section) + ends

    def host(self, *, backward: bool) -> float:
        """Compute the seconds that the host takes to launch the collectives of a layer.

        Each parameter has a collective of its own: an all-gather under ZeRO-3, and in the backward pass a
        reduce-scatter of its gradient.
        """
        rounds = int(self.context.strategies.zero == 3) + int(backward)
        section = self._bytes.layer_section
        tensors = section.tensors + (0 if section.experts is None else section.experts.tensors)
        return rounds * tensors * self.context.collective_host

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
