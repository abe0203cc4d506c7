"""Shard sizes of a model on one TP rank."""

from dataclasses import dataclass
from functools import cached_property

from realrl.families.shape import Head, ModelShape
from realrl.families.tensors import model_tensors
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
    def _elements(self) -> tuple[list[int], list[int], list[int], list[int]]:
        """Stored elements by TP rank: of a layer, the embedding table, the final norm, and the head."""
        found: tuple[list[int], list[int], list[int], list[int]] = ([], [], [], [])
        few = self.shape.model_copy(update={"layers": 1, "tied_embeddings": False})
        for t in range(self.tp):
            sums = [0, 0, 0, 0]
            for spec in model_tensors(few, self.head):
                name = spec.name.split(".")[-2]
                place = 0 if spec.layer == 0 else {"embed_tokens": 1, "norm": 2}.get(name, 3)
                sums[place] += local_tensor(self.shape, spec, self.tp, t).stored.numel
            for parts, elements in zip(found, sums, strict=True):
                parts.append(elements)
        return found

    @cached_property
    def parts(self) -> tuple[int, int, int]:
        """Elements of a layer, of the embedding table, and of final norm and head, each on its largest rank."""
        layer, embedding, norm, head = self._elements
        tied = self.shape.tied_embeddings and self.head == "lm"
        return max(layer), max(embedding), max(norm) + (0 if tied else max(head))

    def stage_elements(self, pp: int) -> tuple[int, ...]:
        """Compute the elements that each pipeline stage stores on its largest rank."""
        layer, embedding, norm, head = self._elements
        tied = self.shape.tied_embeddings and self.head == "lm"
        counts = [len(layers) for layers in stage_layers(self.shape.layers, pp)]
        result = []
        for stage, layers in enumerate(counts):
            last = stage == pp - 1
            own = [layers * elements for elements in layer]
            if stage == 0 or (last and tied):
                own = [a + b for a, b in zip(own, embedding, strict=True)]
            if last:
                own = [a + b for a, b in zip(own, norm, strict=True)]
            if last and not tied:
                own = [a + b for a, b in zip(own, head, strict=True)]
            result.append(max(own))
        return tuple(result)
