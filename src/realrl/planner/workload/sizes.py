"""Shard sizes of a model on one TP rank."""

from dataclasses import dataclass
from functools import cached_property

from realrl.families.registry import find_layer_options, model_tensors
from realrl.families.shape import Head, ModelShape
from realrl.families.tensors import Partial, Place
from realrl.layout.layout import local_tensor
from realrl.layout.ranges import feed_forward, padded_vocabulary, stage_layers
from realrl.layout.shard import Shard


@dataclass(frozen=True)
class LocalSizes:
    """Shard sizes under TP degree `tp`, in elements, each on the rank where it is largest."""

    shape: ModelShape
    head: Head
    tp: int

    @cached_property
    def _shards(self) -> list[Shard]:
        return [Shard(self.shape, self.head, self.tp, t) for t in range(self.tp)]

    @cached_property
    def q_dim(self) -> int:
        """Query dimension: heads times head size."""
        return self.shape.head_dim * max(len(shard.queries) for shard in self._shards)

    @cached_property
    def kv_dim(self) -> int:
        """Key dimension, which equals the value dimension."""
        return self.shape.head_dim * max(len(shard.keys) for shard in self._shards)

    @cached_property
    def cache_dim(self) -> int:
        """Key dimension as stored in the KV cache: expanded to the queries where groups are uneven."""
        uneven = any(shard.uneven_groups is not None for shard in self._shards)
        return self.q_dim if uneven else self.kv_dim

    @cached_property
    def ffn_dim(self) -> int:
        """Feed-forward dimension."""
        return max(len(feed_forward(self.shape, self.tp, t)) for t in range(self.tp))

    @cached_property
    def padded_vocab(self) -> int:
        """Vocabulary rows of the embedding table, padding included."""
        return padded_vocabulary(self.shape, self.tp)

    @cached_property
    def matmul_shapes(self) -> tuple[tuple[int, int], ...]:
        """Matmuls of a layer as (outputs, inputs): fused QKV, output, fused gate and up, down."""
        hidden = self.shape.hidden_size
        return (
            (self.q_dim + 2 * self.kv_dim, hidden),
            (hidden, self.q_dim),
            (2 * self.ffn_dim, hidden),
            (hidden, self.ffn_dim),
        )

    @cached_property
    def shares_kv_heads(self) -> bool:
        """Whether some key/value head is replicated on several TP ranks."""
        return self._shards[0].shares_keys

    @cached_property
    def qk_norm(self) -> bool:
        """Whether the heads of queries and keys are normalised."""
        return find_layer_options(self.shape).qk_norm

    def partial_elements(self, *, sequence_parallel: bool) -> int:
        """Count the elements of a layer whose gradients are partial on each TP rank.

        Those of shared key/value heads are not among them.
        """
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
        """Elements of a layer, of what precedes the layers, and of what follows them, each on its largest rank.

        An embedding table that is also the head precedes the layers.
        """
        found = self._elements
        first = _added(found[Place.FIRST], found[Place.BOTH_ENDS])
        return max(found[0]), max(first), max(found[Place.LAST])

    def stage_elements(self, pp: int) -> tuple[int, ...]:
        """Compute the elements that each pipeline stage stores on its largest rank."""
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
