"""Planners of torch.distributed.checkpoint for pieces of tensors."""

from typing import Any

from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta

from realrl.checkpoint.state.pieces import State


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
