"""Memory of sections that ZeRO-2 and ZeRO-3 have whole while they are computed: parameters, and their gradients."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from realrl.layout.sets import element_width
from realrl.planner.workload.shard_sizes import LocalSizes
from realrl.planner.workload.strategies import Strategies
from realrl.program.arrays import Bools, Ints, apply_each

_FLOAT32 = 4


@dataclass(frozen=True, kw_only=True)
class SectionBytes:
    """Bytes of a section on the fullest TP rank, under each of some strategies."""

    parameters: Ints
    """What is gathered of it; 0 where all of it is in memory anyway."""
    gradients: Ints
    """Float32 gradients of all rows."""
    sums: Ints
    """Float32 sums of a rank's rows of them, which a reduce-scatter gives."""
    tensors: int
    """Parameters that it consists of, each of which has a collective of its own."""


@dataclass(frozen=True)
class GatheredMemory:
    """Bytes at moments of passes under strategies of ZeRO-2 or ZeRO-3. Stages are rows of arrays.

    While a section is computed, the parameters of the next one arrive; gradients of a section are there until those
    of the one that follows in the backward pass are on their way, too (`engine.sharding`).
    """

    sizes: LocalSizes
    strategies: Strategies
    element_bytes: int

    def embedding(self) -> Ints:
        """Compute the bytes while tokens are embedded."""
        return self.embedding_section.parameters + self.layer_section.parameters

    def layer(self, *, last_stage: Bools, layers: Ints) -> Ints:
        """Compute the most bytes while layers of a stage are computed forward."""
        layer = self.layer_section.parameters
        next_layer = np.where(layers > 1, layer, 0)
        return layer + np.maximum(next_layer, np.where(last_stage, self.head_section.parameters, 0))

    def head(self) -> Ints:
        """Compute the bytes while the head is computed forward, without a backward pass."""
        return self.head_section.parameters

    def head_backward(self) -> Ints:
        """Compute the bytes while the head is computed backward: parameters of the last layer arrive."""
        head = self.head_section
        return head.parameters + head.gradients + self.layer_section.parameters

    def first_layer_backward(self, *, last_stage: Bools, layers: Ints) -> Ints:
        """Compute the bytes in the backward pass of a stage's last layer, while all activations are there."""
        layer = self.layer_section
        arriving = np.where(layers > 1, layer.parameters, 0)
        return layer.parameters + arriving + layer.gradients + self._leaving_head(last_stage)

    def later_layer_backward(self, *, last_stage: Bools, layers: Ints) -> Ints:
        """Compute the bytes while the gradients of a layer are reduced, and those of one before it still are."""
        layer, several = self.layer_section, layers > 1
        arriving = np.where(several, layer.parameters, 0)
        leaving = np.where(several, layer.gradients + layer.sums, 0)
        leaving = np.maximum(leaving, self._leaving_head(last_stage))
        return layer.parameters + arriving + layer.gradients + layer.sums + leaving

    def embedding_backward(self) -> Ints:
        """Compute the bytes while gradients of the embedding, which takes no parameters for them, are reduced."""
        embedding, layer = self.embedding_section, self.layer_section
        return embedding.gradients + embedding.sums + layer.gradients + layer.sums

    def update(self) -> Ints:
        """Compute the bytes while ranks spread what they have updated: two sections that are under way (ZeRO-2)."""
        if self.strategies.zero != 2:
            return np.zeros_like(self.strategies.dp)
        width = self.element_bytes

        def count(dp: int) -> int:
            (trained,) = [of for name, of in self.sizes.cut_sets(dp).items() if self.sizes.part.sets[name]]
            sections = sorted((trained.embedding, trained.layer, trained.layer, trained.end), key=max)
            # Of a lower precision, rows are rounded first.
            return (dp * width + (width if width < _FLOAT32 else 0)) * sum(map(max, sections[-2:]))

        return apply_each(count, self.strategies.dp)

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

    def _leaving_head(self, last_stage: Bools) -> Ints:
        head = self.head_section
        return np.where(last_stage, head.gradients + head.sums, 0)

    def _section(self, name: str) -> SectionBytes:
        dp, shares = self.strategies.dp, self.strategies.zero == 3
        sums = apply_each(self._counter(name, lambda of: _FLOAT32 * self.sizes.part.sets[of]), dp)
        rows = apply_each(self._counter(name, lambda of: element_width(of, self.element_bytes)), dp)
        return SectionBytes(
            parameters=dp * rows if shares else np.zeros_like(dp),
            gradients=dp * sums,
            sums=sums,
            tensors=self.sizes.parameter_counts[name],
        )

    def _counter(self, name: str, width: Callable[[str], int]) -> Callable[[int], int]:
        """Make a function that counts the bytes of a rank's rows of a section, for a number of ranks.

        `width` is that of an element of a parameter set. Of layers, the first or the last one counts: they may be
        in other sets.
        """

        def count(dp: int) -> int:
            return max(
                sum(
                    width(of) * max(getattr(sizes, name))
                    for of, sizes in self.sizes.cut_sets(dp).items()
                    if name != "layer" or number in sizes.layers
                )
                for number in (0, self.sizes.shape.layers - 1)
            )

        return count
