"""Memory of sections that ZeRO-2 and ZeRO-3 have whole while they are computed: parameters, and their gradients."""

from dataclasses import dataclass
from functools import cached_property

from realrl.layout.sets import element_width
from realrl.plan.placement import Strategy
from realrl.planner.workload.shard_sizes import LocalSizes

_FLOAT32 = 4


@dataclass(frozen=True, order=True, kw_only=True)
class SectionBytes:
    """Bytes of a section on the fullest TP rank."""

    parameters: int
    """What is gathered of it; 0 where all of it is in memory anyway."""
    gradients: int
    """Float32 gradients of all rows."""
    sums: int
    """Float32 sums of a rank's rows of them, which a reduce-scatter gives."""
    tensors: int
    """Parameters that it consists of, each of which has a collective of its own."""


@dataclass(frozen=True)
class GatheredMemory:
    """Bytes at moments of passes; all are 0 under ZeRO-1.

    While a section is computed, the parameters of the next one arrive; gradients of a section are there until those
    of the one that follows in the backward pass are on their way, too (`engine.sharding`).
    """

    sizes: LocalSizes
    strategy: Strategy
    element_bytes: int

    def embedding(self) -> int:
        """Compute the bytes while tokens are embedded."""
        return self.embedding_section.parameters + self.layer_section.parameters

    def layer(self, *, last_stage: bool, layers: int) -> int:
        """Compute the most bytes while layers of a stage are computed forward."""
        following = [self.layer_section.parameters] if layers > 1 else []
        following += [self.head_section.parameters] if last_stage else []
        return self.layer_section.parameters + max(following, default=0)

    def head(self) -> int:
        """Compute the bytes while the head is computed forward, without a backward pass."""
        return self.head_section.parameters

    def head_backward(self) -> int:
        """Compute the bytes while the head is computed backward: parameters of the last layer arrive."""
        return self.head_section.parameters + self.head_section.gradients + self.layer_section.parameters

    def first_layer_backward(self, *, last_stage: bool, layers: int) -> int:
        """Compute the bytes in the backward pass of a stage's last layer, while all activations are there."""
        arriving = self.layer_section.parameters if layers > 1 else 0
        return (
            self.layer_section.parameters
            + arriving
            + self.layer_section.gradients
            + self._leaving_head(last_stage)
        )

    def later_layer_backward(self, *, last_stage: bool, layers: int) -> int:
        """Compute the bytes while the gradients of a layer are reduced, and those of one before it still are."""
        layer = self.layer_section
        arriving = layer.parameters if layers > 1 else 0
        leaving = self._leaving_head(last_stage) if layers == 1 or last_stage else 0
        leaving = max(leaving, layer.gradients + layer.sums if layers > 1 else 0)
        return layer.parameters + arriving + layer.gradients + layer.sums + leaving

    def _leaving_head(self, last_stage: bool) -> int:
        return self.head_section.gradients + self.head_section.sums if last_stage else 0

    def embedding_backward(self) -> int:
        """Compute the bytes while gradients of the embedding, which takes no parameters for them, are reduced."""
        embedding, layer = self.embedding_section, self.layer_section
        return embedding.gradients + embedding.sums + layer.gradients + layer.sums

    def update(self) -> int:
        """Compute the bytes while ranks spread what they have updated: two sections that are under way (ZeRO-2)."""
        if self.strategy.zero != 2:
            return 0
        sizes = self.sizes.cut_sets(self.strategy.dp)
        (trained,) = [sizes[name] for name, updated in self.sizes.part.sets.items() if updated]
        sections = sorted((max(trained.embedding), max(trained.layer), max(trained.layer), max(trained.end)))
        # Of a lower precision, rows are rounded first.
        each = self.strategy.dp * self.element_bytes + (self.element_bytes if self.element_bytes < 4 else 0)
        return each * sum(sections[-2:])

    @cached_property
    def layer_section(self) -> SectionBytes:
        """A decoder layer."""
        return self._section("layer")

    @cached_property
    def embedding_section(self) -> SectionBytes:
        """Embedding of tokens and positions."""
        return self._section("embedding")

    @cached_property
    def head_section(self) -> SectionBytes:
        """Final norm and head; with tied embeddings these belong to it."""
        end, embedding = self._section("end"), self.embedding_section
        if not self.sizes.trained.tied:
            return end
        return SectionBytes(
            parameters=end.parameters + embedding.parameters,
            gradients=end.gradients + embedding.gradients,
            sums=end.sums + embedding.sums,
            tensors=end.tensors + embedding.tensors,
        )

    def _section(self, name: str) -> SectionBytes:
        """Find a section's bytes; of layers those of the first or of the last one, which may be in other sets."""
        strategy = self.strategy
        found = SectionBytes(parameters=0, gradients=0, sums=0, tensors=0)
        if strategy.zero == 1:
            return found
        cut = self.sizes.cut_sets(strategy.dp)
        for number in (0, self.sizes.shape.layers - 1):
            parameters = sums = 0
            for of, sizes in cut.items():
                rows = max(getattr(sizes, name)) if name != "layer" or number in sizes.layers else 0
                if strategy.shards_parameters:
                    parameters += strategy.dp * rows * element_width(of, self.element_bytes)
                if self.sizes.part.sets[of]:
                    sums += _FLOAT32 * rows
            tensors = self.sizes.parameter_counts[name]
            candidate = SectionBytes(
                parameters=parameters, gradients=strategy.dp * sums, sums=sums, tensors=tensors
            )
            found = max(found, candidate)
        return found
