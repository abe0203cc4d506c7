"""Memory that a rank would take on a GPU that is not there: storages of fake tensors while they are alive."""

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from realrl.plan.placement import Placement
from realrl.program.memory import StoredModel
from tests.gpu_branches.fake_gpu import fake_gpu
from tests.planner.lone_rank import LoneRank, Sequences, nobody_else


class StorageCounter(TorchDispatchMode):
    """Counts what operators allocate for their results; not what they take only while they run."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        """Most bytes that were alive after an operator."""
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        known = {_storage(tensor)._cdata for tensor in _list_fakes((args, kwargs))}
        result = func(*args, **kwargs)
        for tensor in _list_fakes(result):
            storage = _storage(tensor)
            if storage._cdata not in known:
                self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._alive = {key: found for key, found in self._alive.items() if not found[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))
        return result


def _list_fakes(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, FakeTensor)]


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()


def count_peak(
    kind: str, model: StoredModel, placement: Placement, stage: int, lengths: tuple[int, ...]
) -> int:
    """Most bytes that a train or inference call takes on the last TP rank of a stage; in a process of its own."""
    with fake_gpu() as gpu:
        rank = placement.rank(dp=0, tp=placement.strategy.tp - 1, pp=stage)
        lone = LoneRank(model, placement, rank, gpu.device)
        with nobody_else(), StorageCounter() as counter:
            run = lone.train if kind == "train" else lone.infer
            run(Sequences.of(lengths, model))
    return counter.peak
