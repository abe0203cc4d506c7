"""Sizes of what one tensor rank computes with."""

from dataclasses import dataclass
from functools import cached_property

from realrl.families.registry import layer_options, model_tensors
from realrl.families.shape import Head, ModelShape
from realrl.families.tensors import Partial, Place
from realrl.layout.layout import local_tensor
from realrl.layout.ranges import feed_forward, padded_vocabulary, stage_layers
from realrl.layout.shard import Shard

BUCKET_ELEMENTS = 2**24
"""Of gradients and parameters, that travel in one collective (`engine.flat`)."""


def buckets(elements: int) -> int:
    """Buckets that so many elements are cut into."""
    return max(1, round(elements / BUCKET_ELEMENTS))


@dataclass(frozen=True)
class LocalSizes:
    """A model cut `tp` ways: widths, in elements, on the rank that has most of each."""

    shape: ModelShape
    head: Head
    tp: int

    @cached_property
    def _shards(self) -> list[Shard]:
        return [Shard(self.shape, self.head, self.tp, t) for t in range(self.tp)]

    @cached_property
    def queries(self) -> int:
        """Width of the queries."""
        return self.shape.head_dim * max(len(shard.queries) for shard in self._shards)

    @cached_property
    def keys(self) -> int:
        """Width of the keys; that of the values is the same."""
        return self.shape.head_dim * max(len(shard.keys) for shard in self._shards)

    @cached_property
    def cached(self) -> int:
        """Width of the keys as the key/value cache holds them."""
        uneven = any(shard.uneven_groups is not None for shard in self._shards)
        return self.queries if uneven else self.keys

    @cached_property
    def inner(self) -> int:
        """Width inside the feed-forward block."""
        return max(len(feed_forward(self.shape, self.tp, t)) for t in range(self.tp))

    @cached_property
    def vocabulary(self) -> int:
        """Rows of the embedding table, padding included."""
        return padded_vocabulary(self.shape, self.tp)

    @cached_property
    def products(self) -> tuple[tuple[int, int], ...]:
        """(outputs, inputs) of the matrices of a layer, as they are multiplied."""
        hidden = self.shape.hidden_size
        return (
            (self.queries + 2 * self.keys, hidden),
            (hidden, self.queries),
            (2 * self.inner, hidden),
            (hidden, self.inner),
        )

    @cached_property
    def shares_keys(self) -> bool:
        """Whether some key/value head lies on more than one tensor rank."""
        return self._shards[0].shares_keys

    @cached_property
    def qk_norm(self) -> bool:
        """Whether the heads of queries and keys are normalised."""
        return layer_options(self.shape).qk_norm

    def partial_elements(self, *, sequence_parallel: bool) -> int:
        """Elements of a layer whose gradients TP ranks compute in parts and add up, besides shared key/value
        heads."""
        partial = {Partial.TENSOR_PARALLEL} | ({Partial.SEQUENCE_PARALLEL} if sequence_parallel else set())
        specs = model_tensors(self.shape.model_copy(update={"layers": 1}), self.head)
        return sum(spec.numel for spec in specs if spec.layer == 0 and spec.partial_gradient in partial)

    @cached_property
    def _elements(self) -> dict[Place | int, list[int]]:
        """Elements stored per TP rank: of a layer, under 0, and of what the ends of a pipeline hold."""
        found: dict[Place | int, list[int]] = {place: [0] * self.tp for place in (0, *Place)}
        for spec in model_tensors(self.shape.model_copy(update={"layers": 1}), self.head):
            for t in range(self.tp):
                found[spec.place][t] += local_tensor(self.shape, spec, self.tp, t).numel
        return found

    @cached_property
    def parts(self) -> tuple[int, int, int]:
        """Elements of a layer, of what precedes the layers, and of what follows them, on the fullest rank; an
        embedding table that is also the head counts as the former."""
        found = self._elements
        first = _added(found[Place.FIRST], found[Place.BOTH_ENDS])
        return max(found[0]), max(first), max(found[Place.LAST])

    def stage_elements(self, pp: int) -> tuple[int, ...]:
        """Elements that each stage of a pipeline stores on its fullest rank."""
        found = self._elements
        result = []
        for stage, layers in enumerate(stage_layers(self.shape.layers, pp)):
            own = [len(layers) * elements for elements in found[0]]
            if stage == 0:
                own = _added(own, found[Place.FIRST])
            if stage == pp - 1:
                own = _added(own, found[Place.LAST])
            if stage in (0, pp - 1):
                own = _added(own, found[Place.BOTH_ENDS])
            result.append(max(own))
        return tuple(result)


def _added(left: list[int], right: list[int]) -> list[int]:
    return [a + b for a, b in zip(left, right, strict=True)]
