"""Times of memory: copies on a rank, and optimizer updates, which memory bandwidth limits."""

from collections.abc import Mapping, Sequence

import torch

from realrl.engine.buffers import FlatBuffer
from realrl.engine.offload import Offloadable
from realrl.engine.training.optimizer import ShardedAdamW
from realrl.families.tensors import TensorSpec
from realrl.layout.limits import bucket_count
from realrl.model.group import make_single_rank_group
from realrl.planner.profile.profile import CollectiveKind
from realrl.recipe.model import OptimizerConfig
from realrl.runtime.profiler.points.clock import Clock

_ELEMENT = 4  # all of it is measured with float32


def measure_copies(number_bytes: int, clock: Clock) -> Mapping[CollectiveKind, float]:
    """Measure the seconds of copies of `number_bytes` in a rank's memory, and to and from the host's."""
    source = torch.zeros(max(1, number_bytes // _ELEMENT), device=clock.device)
    target = torch.zeros_like(source)
    begin = clock.now()
    target.copy_(source)
    copied = clock.now()
    source.zero_()
    cleared = clock.now()
    fresh = torch.zeros_like(source)
    allocated = clock.now()
    copy, clear, allocate = clock.between(begin, copied, cleared, allocated)
    del source, fresh
    moving = Offloadable([target])
    moving.offload()  # host memory is taken the first time
    moving.load()
    begin = clock.now()
    moving.offload()
    moving.load()
    (both,) = clock.between(begin, clock.now())
    return {"copy": copy, "clear": clear, "allocate": allocate, "host": both / 2}


class Update:
    """Optimizer of tensors that are not sharded."""

    def __init__(self, tensors: Sequence[TensorSpec], dtype: torch.dtype, clock: Clock) -> None:
        count = bucket_count(sum(tensor.numel for tensor in tensors))
        self._clock = clock
        parameters = FlatBuffer(tensors, dtype, clock.device, multiple_of=count)
        self._gradients = FlatBuffer(tensors, torch.float32, clock.device, multiple_of=count)
        self._optimizer = ShardedAdamW(
            parameters, self._gradients, OptimizerConfig(), make_single_rank_group()
        )

    def seconds(self) -> float:
        """Measure the seconds of an update whose gradients have been reduced, without clearing them."""
        clock = self._clock
        gradients = self._gradients.data
        gradients.fill_(1.0)
        for bucket in range(self._optimizer.buckets):
            self._optimizer.start_reduce(bucket)
        begin = clock.now()
        self._optimizer.step(1e-6)
        stepped = clock.now()
        gradients.zero_()
        step, clear = clock.between(begin, stepped, clock.now())
        return step - clear
