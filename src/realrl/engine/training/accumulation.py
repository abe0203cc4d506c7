"""Accumulation of gradients over the micro-batches of a mini-batch, in one of two ways."""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from realrl.engine.buffers.flat import FlatBuffer
from realrl.engine.buffers.local_set import LocalSet
from realrl.engine.training.optimizer import ShardedAdamW


class Accumulation(Protocol):
    """Gradients of a parameter set, and the optimizer of what this rank updates of it."""

    gradients: FlatBuffer
    """What this rank has accumulated."""
    optimizer: ShardedAdamW
    updated: LocalSet
    """Tensors, or rows of them, that the optimizer works on; a rank may update only a part of these."""

    @property
    def persistent(self) -> list[Tensor]:
        """Tensors that must survive between steps, besides the model's parameters."""
        ...

    def agree_on_passes(self, count: int) -> int:
        """Agree on the number of micro-batches that ranks take part in, at least `count`."""
        ...

    def idle_forward(self) -> None:
        """Take part in a forward pass of other ranks."""
        ...

    def idle_backward(self) -> None:
        """Take part in a backward pass of other ranks."""
        ...

    def start_backward(self, *, last: bool) -> None:
        """Begin a backward pass, the last one of a mini-batch or another."""
        ...

    def finish_backward(self) -> None:
        """End a backward pass."""
        ...

    def finalize(self) -> Mapping[str, Tensor]:
        """Complete the gradients of a mini-batch; those of some tensors, summed over ranks already, by name."""
        ...

    def spread(self) -> None:
        """Bring what has been updated to where the model computes with it, as far as the optimizer has not."""
        ...

    def adopt(self) -> None:
        """Take over parameters that have been given other values, as far as the optimizer does not."""
        ...
