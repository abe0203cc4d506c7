"""Pieces of global tensors that one rank writes or reads.

torch.distributed.checkpoint takes a second to import, and is imported where a checkpoint is written or read.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
    from torch.distributed.checkpoint.planner import WriteItem

CHUNK_BYTES = 64 << 20
"""Maximum bytes of a box in a checkpoint, so that reading one takes little memory."""


@dataclass(frozen=True, eq=False)
class TensorPieces:
    """A rank's pieces of one global tensor.

    shape: of the global tensor; pieces: the values of boxes by their offsets, in the shapes of the boxes. Boxes of
    one rank do not overlap, nor do those that several ranks write.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: dict[tuple[int, ...], Tensor] = field(default_factory=dict)

    def size(self) -> torch.Size:
        """Shape of the global tensor."""
        return torch.Size(self.shape)

    def __create_write_items__(self, fqn: str, _: object) -> "list[WriteItem]":
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> "list[ChunkStorageMetadata]":
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [
            ChunkStorageMetadata(torch.Size(offset), values.shape) for offset, values in self.pieces.items()
        ]


State = Mapping[str, TensorPieces]
"""Tensors of a checkpoint as one rank sees them, by name."""
