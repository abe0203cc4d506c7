"""Memory of whole sections under ZeRO-2 and ZeRO-3: gathered parameters, and gradients before they are reduced. A
section is the embedding, a layer, or the final norm with the head."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from realrl.layout.sets import element_width
from realrl.planner.workload.shard_sizes import LocalSizes, SetSizes
from realrl.planner.workload.strategies import Strategies
from realrl.program.arrays import Bools, Ints

_FLOAT32 = 4
_EXPERT_TENSORS = 2
"""Number of parameter tensors of a layer's experts: gate and up, and down."""


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
    """Number of parameter tensors in the section, without those of whole experts. Each has its own collective."""
    experts: "SectionBytes | None" = None
    """The part of the bytes for whole experts, which other ranks gather and reduce. None without expert
    parallelism."""


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

        def count(copies: int, expert_copies: int) -> int:
            cut = self.sizes.cut_sets(copies, expert_copies)
            (trained,) = [of for name, of in cut.items() if self.sizes.part.sets[name]]
            # Below float32, a rank first makes a rounded copy of its rows.
            rounded = width if width < _FLOAT32 else 0
            layer = (copies * width + rounded) * max(trained.layer)
            layer += (expert_copies * width + rounded) * trained.experts
            ends = [(copies * width + rounded) * max(rows) for rows in (trained.embedding, trained.end)]
            return sum(sorted((layer, layer, *ends))[-2:])

        return _apply_pairs(count, self.strategies)

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
        found = self._part(name, lambda sizes: max(getattr(sizes, name)), self.strategies.copies)
        tensors = self.sizes.parameter_counts[name]
        if name != "layer" or self.sizes.ep == 1:
            return replace(found, tensors=tensors)
        experts = self._part(name, lambda sizes: sizes.experts, self.strategies.expert_copies)
        return SectionBytes(
            parameters=found.parameters + experts.parameters,
            gradients=found.gradients + experts.gradients,
            sums=found.sums + experts.sums,
            tensors=tensors - _EXPERT_TENSORS,
            experts=replace(experts, tensors=_EXPERT_TENSORS),
        )

    def _part(self, name: str, elements: Callable[[SetSizes], int], ranks: Ints) -> SectionBytes:
        """Count the bytes of a section, or of its whole experts. `elements` returns the elements of one rank's rows
        in a parameter set; `ranks` ranks divide the rows."""
        sums = self._count(name, elements, lambda of: _FLOAT32 * self.sizes.part.sets[of])
        rows = self._count(name, elements, lambda of: element_width(of, self.element_bytes))
        return SectionBytes(
            parameters=ranks * rows if self.strategies.zero == 3 else np.zeros_like(ranks),
            gradients=ranks * sums,
            sums=sums,
            tensors=0,
        )

    def _count(self, name: str, elements: Callable[[SetSizes], int], width: Callable[[str], int]) -> Ints:
        """Count the bytes of one rank's rows of a section. `width` returns the bytes per element of a set.

        The section "layer" is the larger one of the first and the last layer, because their parameters may be in
        different sets.
        """

        def count(copies: int, expert_copies: int) -> int:
            return max(
                sum(
                    width(of) * elements(sizes)
                    for of, sizes in self.sizes.cut_sets(copies, expert_copies).items()
                    if name != "layer" or number in sizes.layers
                )
                for number in (0, self.sizes.shape.layers - 1)
            )

        return _apply_pairs(count, self.strategies)


def _apply_pairs(count: Callable[[int, int], int], strategies: Strategies) -> Ints:
    """Apply a function to the number of ranks with the same parameters, and of those with the same experts, of each
    strategy."""
    pairs = [*zip(strategies.copies.tolist(), strategies.expert_copies.tolist(), strict=True)]
    known = {pair: count(*pair) for pair in {*pairs}}
    return np.array([known[pair] for pair in pairs], dtype=np.int64)
