"""Memory of whole sections under ZeRO-2 and ZeRO-3: gathered parameters, and gradients before they are reduced. A
section is the embedding, a layer, or the final norm with the head."""

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
    """Bytes of a section on the TP rank with the most bytes, under several strategies, [strategies]."""

    parameters: Ints
    """Gathered parameters under ZeRO-3. 0 under ZeRO-2, in which every rank keeps all parameters anyway."""
    gradients: Ints
    """Float32 gradients of all rows, before the reduce-scatter."""
    sums: Ints
    """Float32 gradients of a rank's own rows, after the reduce-scatter."""
    tensors: int
    """Number of parameter tensors in the section. Each has its own collective."""


@dataclass(frozen=True)
class GatheredMemory:
    """Bytes of whole sections at moments of a pass, [stages, strategies] or [strategies].

    While a device computes a section, the parameters of the next section arrive. The gradients of a section stay
    until the reduction of the next section's gradients has started (`engine.sharding`).
    """

    sizes: LocalSizes
    strategies: Strategies
    element_bytes: int

    def embedding(self) -> Ints:
        return self.embedding_section.parameters + self.layer_section.parameters

    def layer(self, *, last_stage: Bools, layers: Ints) -> Ints:
        """Compute the peak bytes while the layers of a stage are computed forward."""
        layer = self.layer_section.parameters
        next_layer = np.where(layers > 1, layer, 0)
        return layer + np.maximum(next_layer, np.where(last_stage, self.head_section.parameters, 0))

    def head(self) -> Ints:
        """Compute the bytes while the head is computed forward, without a backward pass."""
        return self.head_section.parameters

    def head_backward(self) -> Ints:
        """Compute the bytes during the head's backward pass, while the parameters of the last layer arrive."""
        head = self.head_section
        return head.parameters + head.gradients + self.layer_section.parameters

    def first_layer_backward(self, *, last_stage: Bools, layers: Ints) -> Ints:
        """Compute the bytes in the backward pass of a stage's last layer, while all activations are still held."""
        layer = self.layer_section
        arriving = np.where(layers > 1, layer.parameters, 0)
        return layer.parameters + arriving + layer.gradients + self._leaving_head(last_stage)

    def later_layer_backward(self, *, last_stage: Bools, layers: Ints) -> Ints:
        """Compute the bytes while the reductions of two sections overlap: a layer, and the section computed before
        it."""
        layer, several = self.layer_section, layers > 1
        arriving = np.where(several, layer.parameters, 0)
        leaving = np.where(several, layer.gradients + layer.sums, 0)
        leaving = np.maximum(leaving, self._leaving_head(last_stage))
        return layer.parameters + arriving + layer.gradients + layer.sums + leaving

    def embedding_backward(self) -> Ints:
        """Compute the bytes while gradients of the embedding are reduced. Its backward pass reads no parameters."""
        embedding, layer = self.embedding_section, self.layer_section
        return embedding.gradients + embedding.sums + layer.gradients + layer.sums

    def update(self) -> Ints:
        """Compute the bytes while updated parameters are all-gathered (ZeRO-2), at most two sections at a time."""
        if self.strategies.zero != 2:
            return np.zeros_like(self.strategies.pp)
        width = self.element_bytes

        def count(copies: int) -> int:
            cut = self.sizes.cut_sets(copies)
            (trained,) = [of for name, of in cut.items() if self.sizes.part.sets[name]]
            sections = sorted((trained.embedding, trained.layer, trained.layer, trained.end), key=max)
            # Below float32, a rank first makes a rounded copy of its rows.
            return (copies * width + (width if width < _FLOAT32 else 0)) * sum(map(max, sections[-2:]))

        return apply_each(count, self.strategies.copies)

    @cached_property
    def layer_section(self) -> SectionBytes:
        return self._section("layer")

    @cached_property
    def embedding_section(self) -> SectionBytes:
        return self._section("embedding")

    @cached_property
    def head_section(self) -> SectionBytes:
        """Final norm and head. With tied embeddings, this section also includes the embedding table."""
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
        copies, shares = self.strategies.copies, self.strategies.zero == 3
        sums = apply_each(self._counter(name, lambda of: _FLOAT32 * self.sizes.part.sets[of]), copies)
        rows = apply_each(self._counter(name, lambda of: element_width(of, self.element_bytes)), copies)
        return SectionBytes(
            parameters=copies * rows if shares else np.zeros_like(copies),
            gradients=copies * sums,
            sums=sums,
            tensors=self.sizes.parameter_counts[name],
        )

    def _counter(self, name: str, width: Callable[[str], int]) -> Callable[[int], int]:
        """Make a function that counts the bytes of one rank's rows of a section, given the number of ranks with
        the same parameters.

        `width` returns the bytes per element of a parameter set. The section "layer" is the larger one of the first
        and the last layer, because their parameters may be in different sets.
        """

        def count(copies: int) -> int:
            return max(
                sum(
                    width(of) * max(getattr(sizes, name))
                    for of, sizes in self.sizes.cut_sets(copies).items()
                    if name != "layer" or number in sizes.layers
                )
                for number in (0, self.sizes.shape.layers - 1)
            )

        return count
