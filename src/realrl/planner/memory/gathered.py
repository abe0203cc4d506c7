"""Memory of whole sections under ZeRO-2 and ZeRO-3: gathered parameters, and gradients before they are reduced. A
section is the embedding, a layer, or the final norm with the head."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce

import numpy as np

from realrl.layout.sets import element_width
from realrl.planner.workload.shard_sizes import KindSizes, LocalSizes, SetSizes
from realrl.planner.workload.strategies import Strategies
from realrl.program.arrays import Bools, Ints

_FLOAT32 = 4
_Elements = Callable[[SetSizes], int]
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
            rows = [max(trained.embedding), max(trained.end)]
            sections = [(copies * width + rounded) * most for most in rows]
            for kind in trained.kinds:
                layer = (copies * width + rounded) * max(kind.elements)
                layer += (expert_copies * width + rounded) * kind.experts
                sections += [layer] * min(2, len(kind.layers))
            return sum(sorted(sections)[-2:])

        return _apply_pairs(count, self.strategies)

    @cached_property
    def layer_section(self) -> SectionBytes:
        """The largest layer. If a model has several kinds of layers, bytes are [stages, strategies], and only the
        kinds of each stage count."""
        found = [self.find_layer_section(kind) for kind in self.sizes.kinds]
        if len(found) == 1:
            return found[0]
        there = [kind.count(self.strategies.stages) > 0 for kind in self.sizes.kinds]

        def most(size: Callable[[SectionBytes], Ints]) -> Ints:
            kinds = zip(there, found, strict=True)
            return reduce(np.maximum, [np.where(on_stage, size(of), 0) for on_stage, of in kinds])

        return SectionBytes(
            parameters=most(lambda of: of.parameters),
            gradients=most(lambda of: of.gradients),
            sums=most(lambda of: of.sums),
            tensors=max(of.tensors for of in found),
        )

    def find_layer_section(self, kind: KindSizes) -> SectionBytes:
        """Count the bytes of a layer of a kind. It is the larger one of the first and the last such layer, because
        their parameters may be in different sets."""
        ends = kind.layers[0], kind.layers[-1]
        others = [lambda sizes, n=number: max(sizes.find_layer(n).elements) for number in ends]
        found = self._part(others, self.strategies.copies)
        tensors = kind.sizes.layer_parameters
        if kind.sizes.ep == 1 or not kind.sizes.experts:
            return replace(found, tensors=tensors)
        of_experts = [lambda sizes, n=number: sizes.find_layer(n).experts for number in ends]
        experts = self._part(of_experts, self.strategies.expert_copies)
        return SectionBytes(
            parameters=found.parameters + experts.parameters,
            gradients=found.gradients + experts.gradients,
            sums=found.sums + experts.sums,
            tensors=tensors - _EXPERT_TENSORS,
            experts=replace(experts, tensors=_EXPERT_TENSORS),
        )

    @cached_property
    def embedding_section(self) -> SectionBytes:
        found = self._part([lambda sizes: max(sizes.embedding)], self.strategies.copies)
        return replace(found, tensors=self.sizes.parameter_counts["embedding"])

    @cached_property
    def head_section(self) -> SectionBytes:
        """Final norm and head. With tied embeddings, this section also includes the embedding table."""
        end = self._part([lambda sizes: max(sizes.end)], self.strategies.copies)
        end = replace(end, tensors=self.sizes.parameter_counts["end"])
        embedding = self.embedding_section
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

    def _part(self, elements: Sequence[_Elements], ranks: Ints) -> SectionBytes:
        """Count the bytes of a section, or of its whole experts. `elements` return the elements of one rank's rows
        in a parameter set; the largest result counts. `ranks` ranks divide the rows."""
        sums = self._count(elements, lambda of: _FLOAT32 * self.sizes.part.sets[of])
        rows = self._count(elements, lambda of: element_width(of, self.element_bytes))
        return SectionBytes(
            parameters=ranks * rows if self.strategies.zero == 3 else np.zeros_like(ranks),
            gradients=ranks * sums,
            sums=sums,
            tensors=0,
        )

    def _count(self, elements: Sequence[_Elements], width: Callable[[str], int]) -> Ints:
        """Count the bytes of one rank's rows. `width` returns the bytes per element of a set."""

        def count(copies: int, expert_copies: int) -> int:
            cut = self.sizes.cut_sets(copies, expert_copies).items()
            return max(sum(width(of) * own(sizes) for of, sizes in cut) for own in elements)

        return _apply_pairs(count, self.strategies)


def _apply_pairs(count: Callable[[int, int], int], strategies: Strategies) -> Ints:
    """Apply a function to the number of ranks with the same parameters, and of those with the same experts, of each
    strategy."""
    pairs = [*zip(strategies.copies.tolist(), strategies.expert_copies.tolist(), strict=True)]
    known = {pair: count(*pair) for pair in {*pairs}}
    return np.array([known[pair] for pair in pairs], dtype=np.int64)
