"""Gradients under ZeRO-1: each data-parallel rank accumulates all gradients, and the ranks reduce them once per
mini-batch."""

import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from realrl.engine.buffers import FlatBuffer, LocalSet
from realrl.engine.model import Model
from realrl.engine.training.gradients import (
    Accumulation,
    finalize_model_grads,
    find_counted_elements,
    list_late_tensors,
    require_gradients,
)
from realrl.engine.training.optimizer import ShardedAdamW
from realrl.model.arithmetic.ops import LeftOut
from realrl.recipe.optimizer import OptimizerConfig


class OverlappedGradReduce:
    """Starts the reduce-scatter of a bucket once its gradients are complete (`overlap_grad_reduce` in Megatron's
    DDP).

    Reductions start with the last bucket of each run, because the backward pass completes the last layers first.
    They always start in this order, and all ranks compute gradients in the same order, so that they agree on it.
    Buckets with late tensors wait for the optimizer's step.
    """

    def __init__(
        self, model: Model, gradients: FlatBuffer, optimizer: ShardedAdamW, *, late: Collection[str] = ()
    ) -> None:
        """`late` names tensors whose gradients still change after the backward pass."""
        self._optimizer = optimizer
        self._parameters = [0] * len(optimizer.buckets)
        """Number of parameters with elements in each bucket."""
        self._missing: list[int] | None = None
        """Number of parameters with incomplete gradients in each bucket; None before the last backward passes of a
        mini-batch."""
        self._counts = False
        """Whether the current backward pass is the last one of its virtual stage, and completes gradients."""
        self._waiting: list[deque[int]] = []
        """Buckets of each run that have not started, in starting order."""
        self._nodes: list[Node] = []
        """Autograd's nodes of the parameters. Without a reference from Python, a node would lose its hooks."""
        self._late = {bucket for name in late for bucket in self._find_buckets(gradients, (name,))}
        count = _make_counter(self)
        for name, parameter in model.transformer.named_parameters():
            if not parameter.requires_grad:
                continue
            touched = self._find_buckets(gradients, model.transformer.sources[name])
            for bucket in touched:
                self._parameters[bucket] += 1
            # The node runs after the backward passes of all uses of the parameter. It runs even if these passes add
            # to the gradient themselves and return no gradient to autograd. A hook on the parameter would then not
            # be called.
            node = get_gradient_edge(parameter).node
            node.register_hook(lambda *_, touched=touched: count(touched))
            self._nodes.append(node)

    def _find_buckets(self, gradients: FlatBuffer, names: Sequence[str]) -> range:
        starts = [bucket.start for bucket in self._optimizer.buckets]
        first = gradients.offset(names[0])
        last = gradients.offset(names[-1]) + gradients[names[-1]].numel() - 1
        return range(bisect_right(starts, first) - 1, bisect_right(starts, last))

    def start_backward(self, *, last: bool) -> None:
        """Announce a backward pass; `last`: whether it is the last one of its virtual stage in the mini-batch."""
        self._counts = last
        if not last or self._missing is not None:
            return
        self._missing = list(self._parameters)
        by_run: dict[int, deque[int]] = {}
        for number, bucket in reversed([*enumerate(self._optimizer.buckets)]):
            if number not in self._late:
                by_run.setdefault(bucket.run, deque()).append(number)
        self._waiting = [*by_run.values()]

    def end(self) -> None:
        """End a mini-batch."""
        self._counts, self._missing, self._waiting = False, None, []

    def _count_gradient(self, touched: range) -> None:
        """In a last backward pass, count a parameter's gradient as complete in these buckets, as soon as it is."""
        if self._counts:
            LeftOut.compute_or_add(lambda: self._count_complete(touched))

    def _count_complete(self, touched: range) -> None:
        assert self._missing is not None, "the last backward passes have begun"
        for bucket in touched:
            self._missing[bucket] -= 1
        for waiting in self._waiting:
            while waiting and self._missing[waiting[0]] == 0:
                self._optimizer.start_reduce(self._optimizer.buckets[waiting.popleft()])


def _make_counter(of: OverlappedGradReduce) -> Callable[[range], None]:
    """Make a hook that does not keep `of` alive. A strong reference would make a cycle, because `of` refers to
    autograd's nodes, and nodes refer to their hooks."""
    found = weakref.ref(of)

    def count(touched: range) -> None:
        alive = found()
        if alive is not None:
            alive._count_gradient(touched)

    return count


class FullGradients(Accumulation):
    """Gradients under ZeRO-1, and the optimizer that updates this rank's part of the parameters."""

    def __init__(self, model: Model, trained: LocalSet, config: OptimizerConfig) -> None:
        self._model, self.updated = model, trained
        parameters, groups = trained.buffer, model.groups
        self.gradients = FlatBuffer.of_runs(parameters.runs, torch.float32, model.device)
        require_gradients(model, trained, self.gradients.fused)
        locals_ = trained.layout.tensors(model.rank)
        self.optimizer = ShardedAdamW(
            parameters,
            self.gradients,
            config,
            *(groups.copies_of(run.tensors[0]) if run.tensors else groups.copies for run in parameters.runs),
            norm_group=groups.mesh,
            counted={local.spec.name: find_counted_elements(model, local) for local in locals_},
        )
        self._grad_reduce = OverlappedGradReduce(
            model, self.gradients, self.optimizer, late=list_late_tensors(model, trained)
        )

    def start_backward(self, *, last: bool) -> None:
        self._grad_reduce.start_backward(last=last)

    def discard(self) -> None:
        super().discard()
        self._grad_reduce.end()

    def finalize(self) -> Mapping[str, Tensor]:
        self._grad_reduce.end()
        return finalize_model_grads(self._model, self.gradients)
