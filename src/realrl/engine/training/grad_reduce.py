"""Overlap of gradient reduction over data-parallel ranks with the backward pass."""

from realrl.engine.flat import FlatBuffer
from realrl.engine.model import Model
from realrl.engine.training.optimizer import ShardedAdamW


class OverlappedGradReduce:
    """Gradient reduction that starts a bucket's reduce-scatter once its gradients are complete.

    Megatron's DDP calls this `overlap_grad_reduce`.

    Buckets start from the end of the buffer, where the gradients that come first lie, and always in that
    order, which is therefore the same on every rank.
    """

    def __init__(self, model: Model, gradients: FlatBuffer, optimizer: ShardedAdamW) -> None:
        self._optimizer = optimizer
        self._parameters = [0] * optimizer.buckets
        """Number of parameters with elements in each bucket."""
        self._missing: list[int] | None = None
        """Number of those whose gradients are not complete; None before the last backward pass of a mini-batch."""
        self._next = 0
        """Bucket that is reduced next."""
        sizes = {tensor.name: tensor.numel for tensor in gradients.tensors}
        for name, parameter in model.transformer.named_parameters():
            if not parameter.requires_grad:
                continue
            sources = model.transformer.sources[name]
            first = gradients.offset(sources[0])
            end = first + sum(sizes[source] for source in sources)
            touched = range(first // optimizer.bucket_size, (end - 1) // optimizer.bucket_size + 1)
            for bucket in touched:
                self._parameters[bucket] += 1
            parameter.register_post_accumulate_grad_hook(
                lambda _, touched=touched: self._count_gradient(touched)
            )

    def start_last_backward(self) -> None:
        """Announce that the next backward pass is the last one of the mini-batch."""
        self._missing = list(self._parameters)
        self._next = len(self._parameters) - 1

    def _count_gradient(self, touched: range) -> None:
        """Count a parameter's gradient, in these buckets, as complete if the pass is the last one."""
        if self._missing is None:
            return
        for bucket in touched:
            self._missing[bucket] -= 1
        while self._next >= 0 and self._missing[self._next] == 0:
            self._optimizer.start_reduce(self._next)
            self._next -= 1
        if self._next < 0:
            self._missing = None
