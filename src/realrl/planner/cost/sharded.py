"""Time of gathering parameters and reducing gradients section by section, under ZeRO-2 and ZeRO-3."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from realrl.planner.cost.call_context import CallContext
from realrl.planner.cost.network import Ring
from realrl.planner.memory.gathered import GatheredMemory, SectionBytes
from realrl.program.arrays import Bools, Floats, Ints, Real


@dataclass(frozen=True, kw_only=True)
class SectionSeconds:
    """Seconds of a device on a section of a chunk, without communication of data-parallel ranks."""

    layer: Real
    layer_backward: Real = 0.0
    head_backward: Real = 0.0


@dataclass(frozen=True)
class ShardedTraffic:
    """Collectives of stages under ZeRO-2 and ZeRO-3; times are [stages, strategies].

    They run beside computing, by the `overlap` of the context: the next layer is gathered, and the gradients of the
    layer before are reduced, while a layer is computed.
    """

    context: CallContext

    def forward(self, seconds: SectionSeconds) -> Floats:
        """Compute what a chunk's forward pass waits for: the first sections, and what computing does not hide.

        Nothing hides the embedding and the first layer, which follows its few additions.
        """
        sizes = self._bytes
        gather, hidden = self._gather(sizes.layer_section), seconds.layer * self.context.overlap
        waits = gather + (self.context.layers - 1) * np.maximum(0.0, gather - hidden)
        waits = waits + np.where(self._first, self._gather(sizes.embedding_section), 0.0)
        head = np.maximum(0.0, self._gather(sizes.head_section) - hidden)
        return waits + np.where(self._last, head, 0.0)

    def backward(self, layers: Ints, seconds: SectionSeconds) -> Floats:
        """Compute what a chunk's backward pass waits for, through the last `layers` of each stage."""
        sizes, overlap = self._bytes, self.context.overlap
        gather, reduce = self._gather(sizes.layer_section), self._reduce(sizes.layer_section)
        head = np.where(self._last, self._reduce(sizes.head_section), 0.0)
        embedding = np.where(self._first, self._reduce(sizes.embedding_section), 0.0)
        beside_head = np.where(self._last, seconds.head_backward * overlap, 0.0)
        waits = np.maximum(0.0, gather - beside_head)
        # While layers are computed, all gathers but the first and all reductions but the last go on.
        traffic = head + (layers - 1) * (gather + reduce)
        waits = waits + np.maximum(0.0, traffic - layers * seconds.layer_backward * overlap) + reduce
        return np.where(layers > 0, waits, head) + embedding

    def spread(self, layers: Ints) -> Floats:
        """Compute the seconds in which updated rows come to all ranks that keep all of them (ZeRO-2).

        `layers` of each stage are updated.
        """
        if self.context.strategies.zero != 2:
            return np.zeros_like(layers, dtype=np.float64)
        sizes, width = self._bytes, self.context.timing.element_bytes / 4

        def spread(section: SectionBytes) -> Floats:
            return self._each(self._ring.all_gather, section.tensors, width * section.gradients)

        ends = np.where(self._first, spread(sizes.embedding_section), 0.0)
        ends = ends + np.where(self._last, spread(sizes.head_section), 0.0)
        return layers * spread(sizes.layer_section) + ends

    def host(self, *, backward: bool) -> float:
        """Compute the seconds in which the host launches the collectives of a layer: one for each parameter that is
        gathered (ZeRO-3), and backward one for each gradient that is reduced."""
        rounds = int(self.context.strategies.zero == 3) + int(backward)
        return rounds * self._bytes.layer_section.tensors * self.context.collective_host

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

    @property
    def _ring(self) -> Ring:
        return self.context.network.dp_group

    def _gather(self, section: SectionBytes) -> Floats:
        return self._each(self._ring.all_gather, section.tensors, section.parameters)

    def _reduce(self, section: SectionBytes) -> Floats:
        return self._each(self._ring.reduce_scatter, section.tensors, section.gradients)

    @staticmethod
    def _each(collective: Callable[[Real], Real], count: int, number_bytes: Real) -> Floats:
        """Seconds of a collective for each parameter of a section, which are taken to be of equal size."""
        return np.where(np.asarray(number_bytes) != 0, count * collective(number_bytes / count), 0.0)
