"""Gradients of ZeRO-1: data-parallel ranks accumulate all of them, and reduce them once per mini-batch."""

from collections.abc import Mapping

import torch
from torch import Tensor

from realrl.engine.buffers.flat import FlatBuffer
from realrl.engine.buffers.local_set import LocalSet
from realrl.engine.model import Model
from realrl.engine.training.grad_reduce import OverlappedGradReduce
from realrl.engine.training.gradients import (
    finalize_model_grads,
    find_counted_elements,
    list_late_tensors,
    require_gradients,
)
from realrl.engine.training.optimizer import ShardedAdamW
from realrl.recipe.model import OptimizerConfig


class FullGradients:
    """See `Accumulation`."""

    def __init__(self, model: Model, trained: LocalSet, config: OptimizerConfig) -> None:
        """`trained`: the parameter set that is updated."""
        self._model, self.updated = model, trained
        parameters, groups = trained.buffer, model.groups
        multiple = groups.data.size * parameters.buckets
        self.gradients = FlatBuffer(parameters.tensors, torch.float32, model.device, multiple_of=multiple)
        require_gradients(model, trained, self.gradients.fused)
        locals_ = trained.layout.tensors(model.rank)
        self.optimizer = ShardedAdamW(
            parameters,
            self.gradients,
            config,
            groups.data,
            norm_group=groups.mesh,
            counted={local.spec.name: find_counted_elements(model, local) for local in locals_},
        )
        self._grad_reduce = OverlappedGradReduce(
            model, self.gradients, self.optimizer, late=list_late_tensors(model, trained)
        )

    @property
    def persistent(self) -> list[Tensor]:
        """See `Accumulation`."""
        return self.optimizer.persistent

    def agree_on_passes(self, count: int) -> int:
        """See `Accumulation`."""
        return count

    def idle_forward(self) -> None:
        """See `Accumulation`."""
        raise AssertionError("ranks take part in no passes of others")

    def idle_backward(self) -> None:
        """See `Accumulation`."""
        raise AssertionError("ranks take part in no passes of others")

    def start_backward(self, *, last: bool) -> None:
        """See `Accumulation`."""
        if last:
            self._grad_reduce.start_last_backward()

    def finish_backward(self) -> None:
        """See `Accumulation`."""

    def finalize(self) -> Mapping[str, Tensor]:
        """See `Accumulation`."""
        return finalize_model_grads(self._model, self.gradients)

    def spread(self) -> None:
        """See `Accumulation`."""

    def adopt(self) -> None:
        """See `Accumulation`."""
