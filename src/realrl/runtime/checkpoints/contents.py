"""Tensors of a checkpoint: the boxes of parameters and optimizer state that one rank saves and loads."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from realrl.checkpoint.state.pieces import CHUNK_BYTES, State, TensorPieces
from realrl.engine.buffers import LocalSet
from realrl.engine.model import Model
from realrl.engine.training.gradients import find_counted_elements
from realrl.engine.training.trainer import Trainer
from realrl.layout.boxes import find_boxes
from realrl.layout.local_tensors import LocalTensor
from realrl.layout.sets import TUNED
from realrl.runtime.worker.roles import Roles

PARAMETERS = "parameters"
"""Kind of the tensors ROLE/KIND/NAME that are a model's; others are those of its optimizer state."""


class CheckpointContents:
    """Tensors of all roles that steps change, as this rank holds them.

    Frozen parts of such a role belong to it, but for the model under adapters, which is read from its own files.
    """

    def __init__(self, roles: Roles) -> None:
        self._roles = roles

    def list_saved(self) -> State:
        """List the boxes that this rank writes; those of all ranks make up every tensor once.

        Their values are views of what training changes, or of its copies in host memory.
        """
        state: dict[str, TensorPieces] = {}
        for role, model, name, held in self._list_sets():
            trainer = self._find_trainer(role, name)
            if trainer is None:
                _add_replicated(state, role, model, held)
            else:
                _add_trained(state, role, trainer, whole=False)
        return state

    def list_loaded(self) -> State:
        """List the boxes that this rank reads: what it has of each parameter set, and of trained ones the part
        that it updates; `spread` brings the rest."""
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
        """Have all that is loaded in device memory for the block, in which it changes."""
        memories = [held.memory for _, _, _, held in self._list_sets()]
        memories += [trainer.memory for trainer in self._roles.trainers.values()]
        offloaded = [memory for memory in memories if not memory.resident]
        for memory in offloaded:
            memory.load()
        yield
        for memory in offloaded:
            memory.offload()

    def spread(self) -> None:
        """Bring what ranks have loaded of trained parameters to all that share them."""
        for trainer in self._roles.trainers.values():
            trainer.spread()

    def _list_sets(self) -> list[tuple[str, Model, str, LocalSet]]:
        found = []
        for role in self._roles.learning:
            model = self._roles.home_model(role)
            if model is not None:
                found += [
                    (role, model, name, held)
                    for name, held in model.sets.items()
                    if name == TUNED or not model.part.adapters
                ]
        return found

    def _find_trainer(self, role: str, parameter_set: str) -> Trainer | None:
        trainer = self._roles.trainers.get(role)
        return trainer if trainer is not None and trainer.parameter_set == parameter_set else None


def _add_trained(state: dict[str, TensorPieces], role: str, trainer: Trainer, *, whole: bool) -> None:
    """Add the parts that this rank updates: all of them or, unless `whole`, those that it alone accounts for."""
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
    """Add tensors that are not trained: of n data-parallel ranks that have them alike, each adds one in n."""
    data, placement = model.groups.data, held.layout.placement
    if placement.is_copy(model.rank):
        return
    sharded = placement.strategy.shards_parameters
    flat = held.memory.find_values(held.buffer.data)
    for i, local in enumerate(held.layout.tensors(model.rank)):
        first, end = find_counted_elements(model, local)
        end = min(end, local.region.numel)
        if (sharded or i % data.size == data.index) and first < end:
            start = held.buffer.offset(local.region.tensor)
            pieces = _find_pieces(state, role, PARAMETERS, local, flat.dtype)
            _cut(pieces, local, first, end, flat[start + first : start + end])


def _find_pieces(
    state: dict[str, TensorPieces], role: str, kind: str, local: LocalTensor, dtype: torch.dtype
) -> TensorPieces:
    name = f"{role}/{kind}/{local.spec.name}"
    return state.setdefault(name, TensorPieces(local.spec.shape, dtype))


def _cut(pieces: TensorPieces, local: LocalTensor, first: int, end: int, values: Tensor) -> None:
    """Add elements `first` up to `end` of a tensor as this rank has it, whose values lie back to back."""
    used = 0
    for offset, size in find_boxes(local.region.size, first, end, CHUNK_BYTES // values.itemsize):
        place = tuple(a + b for a, b in zip(local.region.offset, offset, strict=True))
        numel = torch.Size(size).numel()
        pieces.pieces[place] = values[used : used + numel].view(size)
        used += numel
