"""Forward and backward passes under ZeRO-2 and ZeRO-3: what is gathered and reduced when."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from realrl.engine.sharding.gathered import GatheredParameters
from realrl.engine.sharding.gradients import SectionGradients
from realrl.engine.sharding.section_buffers import list_sections
from realrl.layout.shard import Shard
from realrl.model.parallel.sections import Section


class ShardedPasses:
    """Hooks that gather the parameters of a section, and those of the next one while it is computed.

    They are freed after it, gathered again for its backward pass, and freed when that is over; then its gradients
    are reduced. The parameters of the head stay from its forward to its backward pass, which follows. A rank
    that has fewer micro-batches than others idles: it takes part in what is gathered and reduced, and computes
    nothing.
    """

    def __init__(self, shard: Shard, gathered: GatheredParameters | None, *, tied: bool) -> None:
        """`gathered`: None where parameters are in memory anyway; `tied`: whether the head computes with the
        parameters of the embedding in the same stage."""
        self._sections = list_sections(shard)
        self._gathered, self._tied = gathered, tied
        self._gradients: SectionGradients | None = None
        self._backward = range(0)
        """Layers that gradients flow through."""

    def train(self, gradients: SectionGradients, layers: range) -> None:
        """Have backward passes reduce gradients, which flow through these layers of the stage."""
        self._gradients, self._backward = gradients, layers

    def enter(self, section: Section, x: Tensor) -> Tensor:
        """See `SectionHooks`."""
        self._gather(section)
        place = self._sections.index(section)
        if self._gathered is not None and place + 1 < len(self._sections):
            for needed in self._list_needed(self._sections[place + 1]):
                self._gathered.start(needed)
        return _call_backward(x, lambda: self._end_backward(section))

    def leave(self, section: Section, x: Tensor) -> Tensor:
        """See `SectionHooks`."""
        self._free(section)
        return _call_backward(x, lambda: self._begin_backward(section))

    def release(self) -> None:
        """End a pass that is followed by no backward pass."""
        if self._gathered is not None:
            self._gathered.free_all()

    def start_backward(self) -> None:
        """Begin a backward pass."""
        assert self._gradients is not None, "only training has backward passes"
        self._gradients.start_pass()
        if self._sections[-1] == "head":
            for section in self._list_needed("head"):
                self._gradients.begin(section)
        if self._gathered is not None and self._backward:
            self._gathered.start(self._backward[-1])

    def finish_backward(self) -> None:
        """End a backward pass: gradients are in the rows of all ranks, and gathered parameters are freed."""
        assert self._gradients is not None, "only training has backward passes"
        self._gradients.finish_pass()
        self.release()

    def idle_forward(self, *, last: bool) -> None:
        """Take part in a forward pass; `last` where no backward pass follows."""
        nothing = torch.empty(0)
        for section in self._sections:
            self.enter(section, nothing)
            if section != "head":
                self.leave(section, nothing)
        if last:
            self.release()

    def idle_backward(self) -> None:
        """Take part in a backward pass."""
        self.start_backward()
        if self._sections[-1] == "head":
            self._end_backward("head")
        for layer in reversed(self._backward):
            self._begin_backward(layer)
            self._end_backward(layer)
        self.finish_backward()

    def _begin_backward(self, section: Section) -> None:
        """Prepare the backward pass of a section; that of the embedding needs no parameters."""
        if self._gradients is None:  # a backward pass outside of training
            self._gather(section)
            return
        if section != "embedding":
            self._gather(section)
            assert isinstance(section, int), "the head is not left"
            if self._gathered is not None and section - 1 in self._backward:
                self._gathered.start(section - 1)
        self._gradients.begin(section)

    def _end_backward(self, section: Section) -> None:
        if self._gradients is not None:
            self._gradients.reduce(section)
        self._free(section)

    def _gather(self, section: Section) -> None:
        if self._gathered is not None:
            for needed in self._list_needed(section):
                self._gathered.gather(needed)

    def _free(self, section: Section) -> None:
        if self._gathered is not None:
            for needed in self._list_needed(section):
                self._gathered.free(needed)

    def _list_needed(self, section: Section) -> tuple[Section, ...]:
        """List the sections whose parameters a section computes with."""
        return ("head", "embedding") if section == "head" and self._tied else (section,)


class _Border(Function):
    """Identity whose backward pass calls a function first."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Callable[[], None]) -> Tensor:
        ctx.call = call
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.call()
        return grad, None


def _call_backward(x: Tensor, call: Callable[[], None]) -> Tensor:
    """Have a backward pass call a function where it comes to `x`."""
    return _Border.apply(x, call) if torch.is_grad_enabled() and x.requires_grad else x
