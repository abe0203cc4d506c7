"""Time of gathering parameters and reducing gradients section by section, under ZeRO-2 and ZeRO-3."""

from collections.abc import Callable
from dataclasses import dataclass

from realrl.planner.cost.call_context import CallContext
from realrl.planner.cost.network import Ring
from realrl.planner.memory.gathered import GatheredMemory, SectionBytes


@dataclass(frozen=True, kw_only=True)
class SectionSeconds:
    """Seconds of a device on a section of a chunk, without communication of data-parallel ranks."""

    layer: float
    layer_backward: float = 0.0
    head_backward: float = 0.0


@dataclass(frozen=True)
class ShardedTraffic:
    """Collectives of a stage under ZeRO-2 and ZeRO-3; nothing under ZeRO-1.

    They run beside computing, by the `overlap` of the context: the next layer is gathered, and the gradients of the
    layer before are reduced, while a layer is computed.
    """

    context: CallContext

    @property
    def _bytes(self) -> GatheredMemory:
        timing = self.context.timing
        return GatheredMemory(timing.sizes, self.context.strategy, timing.element_bytes)

    def forward(self, stage: int, seconds: SectionSeconds) -> float:
        """Compute what a chunk's forward pass waits for: the first section, and what computing does not hide.

        Nothing hides the embedding and, after its few additions and copies, the first layer.
        """
        layers = self.context.layers[stage]
        gather = self._gather(self._bytes.layer_section)
        hidden = seconds.layer * self.context.overlap
        waits = gather + (layers - 1) * max(0.0, gather - hidden)
        if stage == 0:
            waits += self._gather(self._bytes.embedding_section)
        if stage == self.context.strategy.pp - 1:
            waits += max(0.0, self._gather(self._bytes.head_section) - hidden)
        return waits

    def backward(self, stage: int, layers: int, seconds: SectionSeconds) -> float:
        """Compute what a chunk's backward pass waits for, through the last `layers` of a stage."""
        context, found = self.context, self._bytes
        last = stage == context.strategy.pp - 1
        gather, reduce = self._gather(found.layer_section), self._reduce(found.layer_section)
        head = self._reduce(found.head_section) if last else 0.0
        embedding = self._reduce(found.embedding_section) if stage == 0 else 0.0
        if not layers:
            return head + embedding
        hidden = seconds.layer_backward * context.overlap
        waits = max(0.0, gather - seconds.head_backward * context.overlap) if last else gather
        # While layers are computed, all gathers but the first and all reductions but the last go on.
        waits += max(0.0, head + (layers - 1) * (gather + reduce) - layers * hidden)
        return waits + reduce + embedding

    def spread(self, stage: int) -> float:
        """Compute the seconds in which updated rows come to all ranks that keep all of them (ZeRO-2)."""
        strategy, timing = self.context.strategy, self.context.timing
        if strategy.zero != 2:
            return 0.0
        layers = timing.sizes.trained.stage_layers(strategy.pp)[stage]
        found = [(layers, self._bytes.layer_section)]
        found += [(1, self._bytes.embedding_section)] if stage == 0 else []
        found += [(1, self._bytes.head_section)] if stage == strategy.pp - 1 else []
        width = timing.element_bytes / 4
        return sum(n * self._each(self._ring.all_gather, s.tensors, width * s.gradients) for n, s in found)

    def host(self, *, backward: bool) -> float:
        """Compute the seconds in which the host launches the collectives of a layer."""
        section = self._bytes.layer_section
        count = (section.parameters > 0) + (backward and section.gradients > 0)
        return section.tensors * count * self.context.collective_host

    @property
    def _ring(self) -> Ring:
        return self.context.network.dp_group

    def _gather(self, section: SectionBytes) -> float:
        return self._each(self._ring.all_gather, section.tensors, section.parameters)

    def _reduce(self, section: SectionBytes) -> float:
        return self._each(self._ring.reduce_scatter, section.tensors, section.gradients)

    @staticmethod
    def _each(collective: Callable[[float], float], count: int, number_bytes: float) -> float:
        """Seconds of a collective for each parameter of a section, which are taken to be of equal size."""
        return count * collective(number_bytes / count) if number_bytes else 0.0
