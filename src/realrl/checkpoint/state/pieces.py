"""Pieces of global tensors that one rank writes or reads, in the terms of torch.distributed.checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

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

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(torch.Size(offset), values.shape) for offset, values in self.pieces.items()
        ]


State = Mapping[str, TensorPieces]
"""Tensors of a checkpoint as one rank sees them, by name."""


class PiecesSavePlanner(DefaultSavePlanner):
    """Planner of the writing of tensors that it is made with."""

    def __init__(self, tensors: State) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._tensors = dict(tensors)

    def set_up_planner(
        self, state_dict: Any, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Take its own tensors instead of `state_dict`."""
        super().set_up_planner(self._tensors, storage_meta, is_coordinator)

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Find the values of a box."""
        assert index.offset is not None, "pieces have offsets"
        return self.state_dict[index.fqn].pieces[tuple(index.offset)]


class PiecesLoadPlanner(DefaultLoadPlanner):
    """Planner that finds where values belong by the offsets of their boxes."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Take the tensors as they are: what this replaces leaves nothing of values that are no tensors."""
        self.state_dict = self.original_state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """Find where the values of a box belong."""
        assert index.offset is not None, "pieces have offsets"
        return self.state_dict[index.fqn].pieces[tuple(index.offset)]
