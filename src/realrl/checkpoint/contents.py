"""The boxes (rectangular parts of tensors) that one rank saves to a checkpoint and loads from it.

Importing torch.distributed.checkpoint takes a second. This module therefore imports it only when it is needed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from realrl.engine.buffers import LocalSet
from realrl.engine.model import Model
from realrl.engine.training.gradients import find_counted_elements
from realrl.engine.training.trainer import Trainer
from realrl.layout.local_tensors import LocalTensor
from realrl.layout.region import find_boxes
from realrl.layout.sets import TUNED

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
    from torch.distributed.checkpoint.planner import WriteItem


CHUNK_BYTES = 64 << 20
"""Maximum bytes of one box in a checkpoint, because a reader holds whole boxes in memory."""


@dataclass(frozen=True, eq=False)
class TensorPieces:
    """One rank's pieces of one global tensor. Pieces that are saved never overlap, even across ranks."""

    shape: tuple[int, ...]
    """Shape of the global tensor."""
    dtype: torch.dtype
    pieces: dict[tuple[int, ...], Tensor] = field(default_factory=dict)
    """Maps the offset of each piece in the global tensor to the values of the piece, in its shape."""

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
"""One rank's pieces of all tensors of a checkpoint, by name."""


PARAMETERS = "parameters"
"""The kind of model weights in names of stored tensors, ROLE/KIND/NAME. All other kinds are optimizer state."""


class CheckpointContents:
    """This rank's tensors of the roles that training changes.

    Frozen tensors of these roles are included. The base model of adapters is left out, because it has its own
    files.
    """

    def __init__(
        self,
        roles: Sequence[str],
        find_model: Callable[[str], Model | None],
        trainers: Mapping[str, Trainer],
        list_rows: "Callable[[], State]" = dict,
    ) -> None:
        """`roles`: the roles that training changes.

        `find_model` returns the model of a role that this rank saves and loads, or None. `list_rows` lists rows of
        batches that this rank saves as well (`checkpoint.rows`).
        """
        self._roles, self._find_model, self._trainers = roles, find_model, trainers
        self._list_rows = list_rows

    def list_saved(self) -> State:
        """List the boxes that this rank writes. All ranks together write every element once.

        Values are views of the tensors that training changes, or of their copies in host memory.
        """
        state: dict[str, TensorPieces] = {}
        for role, model, name, held in self._list_sets():
            trainer = self._find_trainer(role, name)
            if trainer is None:
                _add_replicated(state, role, model, held)
            else:
                _add_trained(state, role, trainer, whole=False)
        return {**state, **self._list_rows()}

    def list_loaded(self) -> State:
        """List the boxes that this rank reads.

        If a parameter set is trained, the rank reads only the part that it updates. `spread` then fetches the other
        parts from other ranks.
        """
        state: dict[str, TensorPieces] = {}
        for role, model, name, held in self._list_sets():
            trainer = self._find_trainer(role, name)
            if trainer is None:
                for local in held.layout.tensors(model.rank):
                    if local.region.numel:
                        pieces = _find_pieces(state, role, PARAMETERS, local, held.buffer.data.dtype)
                        own = held.buffer[local.region.tensor][: local.region.size[0]]
                        pieces.pieces[local.region.offset] = own
            else:
                _add_trained(state, role, trainer, whole=True)
        return state

    @contextmanager
    def in_device_memory(self) -> Iterator[None]:
        """Move offloaded tensors into device memory, and offload them again after the block has filled them."""
        memories = [held.memory for _, _, _, held in self._list_sets()]
        memories += [trainer.memory for trainer in self._trainers.values()]
        offloaded = [memory for memory in memories if not memory.resident]
        for memory in offloaded:
            memory.load()
        yield
        for memory in offloaded:
            memory.offload()

    def spread(self) -> None:
        """Send the trained parameters that each rank has loaded to the ranks that hold copies of them."""
        for trainer in self._trainers.values():
            trainer.spread()

    def _list_sets(self) -> list[tuple[str, Model, str, LocalSet]]:
        found = []
        for role in self._roles:
            model = self._find_model(role)
            if model is not None:
                found += [
                    (role, model, name, held)
                    for name, held in model.sets.items()
                    if name == TUNED or not model.part.adapters
                ]
        return found

    def _find_trainer(self, role: str, parameter_set: str) -> Trainer | None:
        trainer = self._trainers.get(role)
        return trainer if trainer is not None and trainer.parameter_set == parameter_set else None


def _add_trained(state: dict[str, TensorPieces], role: str, trainer: Trainer, *, whole: bool) -> None:
    """Add the parameters and optimizer state that this rank updates.

    Without `whole`, add only the elements that no other rank writes to the checkpoint.
    """
    optimizer, model = trainer.optimizer, trainer.model
    if not whole and model.layout.placement.is_copy(model.rank):
        return
    locals_ = {local.region.tensor: local for local in trainer.updated.layout.tensors(model.rank)}
    flat = {kind: trainer.memory.find_values(moment).detach() for kind, moment in optimizer.moments.items()}
    master = optimizer.master
    parameters = trainer.updated_values if master is None else None
    if master is not None:
        flat[PARAMETERS] = trainer.memory.find_values(master)
    for part in optimizer.list_parts():
        local = locals_[part.tensor]
        counted = (0, local.region.numel) if whole else find_counted_elements(model, local)
        first, end = max(part.first, counted[0]), min(part.end, counted[1], local.region.numel)
        for kind in (PARAMETERS, *optimizer.moments):
            source, start = flat.get(kind), part.in_state
            if source is None:
                assert parameters is not None, "parameters are their own masters"
                source, start = parameters, part.in_parameters
            pieces = _find_pieces(state, role, kind, local, torch.float32)
            _cut(pieces, local, first, end, source[start + first - part.first : start + end - part.first])


def _add_replicated(state: dict[str, TensorPieces], role: str, model: Model, held: LocalSet) -> None:
    """Add tensors that are not trained."""
    for local, first, values in list_counted(model, held):
        pieces = _find_pieces(state, role, PARAMETERS, local, values.dtype)
        _cut(pieces, local, first, first + len(values), values)


def list_counted(model: Model, held: LocalSet) -> Iterator[tuple[LocalTensor, int, Tensor]]:
    """List the elements of a parameter set that this rank counts: the tensor, the first element, and flat values.

    All ranks of the model together count every element once. If n ranks have equal copies, each of them counts
    every n-th tensor.
    """
    placement = held.layout.placement
    if placement.is_copy(model.rank):
        return
    sharded = placement.strategy.shards_parameters
    flat = held.memory.find_values(held.buffer.data)
    for i, local in enumerate(held.layout.tensors(model.rank)):
        first, end = find_counted_elements(model, local)
        end = min(end, local.region.numel)
        copies = model.groups.copies_of(local.spec)
        if (sharded or i % copies.size == copies.index) and first < end:
            start = held.buffer.offset(local.region.tensor)
            yield local, first, flat[start + first : start + end]


def _find_pieces(
    state: dict[str, TensorPieces], role: str, kind: str, local: LocalTensor, dtype: torch.dtype
) -> TensorPieces:
    name = f"{role}/{kind}/{local.spec.name}"
    return state.setdefault(name, TensorPieces(local.spec.shape, dtype))


def _cut(pieces: TensorPieces, local: LocalTensor, first: int, end: int, values: Tensor) -> None:
    """Add elements `first` to `end` of this rank's part of a tensor as boxes.

    `values` holds these elements, flat.
    """
    used = 0
    for offset, size in find_boxes(local.region.size, first, end, CHUNK_BYTES // values.itemsize):
        place = tuple(a + b for a, b in zip(local.region.offset, offset, strict=True))
        numel = torch.Size(size).numel()
        pieces.pieces[place] = values[used : used + numel].view(size)
        used += numel
